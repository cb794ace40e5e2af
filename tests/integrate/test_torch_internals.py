"""Every private name of torch and Triton: there in these releases, and missed by name."""

import ast
import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable, profiler
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.modules import batchnorm
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import torch_internals as internals
from gradwire.errors import VersionError

BARE = SimpleNamespace()
HAS_TRITON = importlib.util.find_spec("triton") is not None
CPU = torch.device("cpu")


class Case(NamedTuple):
    """works: whether the function does its work on torch's own objects.

    without: a call that must miss the name; None where the name is missing by design. home: what
    the name is taken away from first, or a function that returns it.
    """

    works: Callable[[Any], bool]
    without: Callable[[], Any] | None = None
    home: Any = None


def state(**fields):
    """A module of FSDP2 with no more than these fields in its record."""
    return SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(**fields))


def mesh(**fields):
    return SimpleNamespace(mesh_info=SimpleNamespace(**fields))


CASES = {
    "torch._C._cuda_getCurrentRawStream": Case(
        lambda t: not torch.cuda.is_available() or internals.raw_stream(0) >= 0,
        lambda: internals.raw_stream(0),
        torch._C,
    ),
    "torch._C._cuda_getDevice": Case(
        lambda t: not torch.cuda.is_available() or internals.current_device() == 0,
        internals.current_device,
        torch._C,
    ),
    "torch._foreach_copy_": Case(
        lambda t: copies_each(), lambda: internals.copy_each([], []), torch
    ),
    "torch.autograd.profiler._is_profiler_enabled": Case(
        lambda t: profiles(), internals.is_profiled, profiler
    ),
    "torch._C._current_graph_task_id": Case(
        lambda t: internals.graph_task() == -1, internals.graph_task, torch._C
    ),
    "torch.autograd.Variable._execution_engine": Case(
        lambda t: callable(internals.execution_engine().queue_callback),
        internals.execution_engine,
        Variable,
    ),
    "DistributedDataParallel._build_params_for_reducer": Case(
        lambda t: len(internals.reduced_parameters(t.ddp)) == 2,
        lambda: internals.reduced_parameters(BARE),
    ),
    "DistributedDataParallel._comm_hooks": Case(
        lambda t: internals.has_hook(t.hooked) and not internals.has_hook(t.ddp),
        lambda: internals.has_hook(BARE),
    ),
    "DistributedDataParallel._get_ddp_logging_data": Case(
        lambda t: not internals.has_hook(copy.deepcopy(t.hooked)),
        lambda: internals.has_hook(SimpleNamespace(_comm_hooks=[BARE])),
    ),
    "DistributedDataParallel._use_python_reducer": Case(
        lambda t: not internals.has_python_reducer(t.ddp),
        lambda: internals.has_python_reducer(BARE),
    ),
    "DistributedDataParallel._join_config": Case(
        lambda t: not internals.is_joining(t.ddp), lambda: internals.is_joining(BARE)
    ),
    "_JoinConfig.enable": Case(
        lambda t: t.joined, lambda: internals.is_joining(SimpleNamespace(_join_config=BARE))
    ),
    "_divide_by_initial_world_size": Case(
        lambda t: internals.divides_by_all_ranks(t.ddp) and not t.divided
    ),
    "_ddp_params_and_buffers_to_ignore": Case(
        lambda t: list(internals.ignored_names(t.told)) == ["bias"]
    ),
    "_in_backward_optimizers": Case(
        lambda t: (
            internals.steps_in_backward(t.stepping.weight)
            and not internals.steps_in_backward(t.told.weight)
        )
    ),
    "_orig_mod": Case(
        lambda t: (
            internals.uncompiled(torch.compile(t.told)) is t.told
            and internals.uncompiled(t.told) is t.told
        )
    ),
    "_optimizer_step_post_hooks": Case(
        lambda t: internals.takes_step_hooks(t.optimizer) and not internals.takes_step_hooks(BARE)
    ),
    "GradScaler._scale": Case(
        lambda t: float(internals.scale_of(t.scaler)) == 8.0, lambda: internals.scale_of(BARE)
    ),
    "GradScaler._per_optimizer_states": Case(
        lambda t: "found_inf_per_device" in internals.overflows_of(t.scaler)[id(t.optimizer)],
        lambda: internals.overflows_of(BARE),
    ),
    "ProcessGroup._get_backend": Case(
        lambda t: internals.backend_of(dist.group.WORLD, CPU).name() == "gloo",
        lambda: internals.backend_of(BARE, CPU),
    ),
    "torch.distributed.distributed_c10d._get_default_store": Case(
        lambda t: isinstance(internals.default_store(), dist.Store),
        internals.default_store,
        dist.distributed_c10d,
    ),
    "torch.distributed.distributed_c10d._process_group_name": Case(
        lambda t: named_group() == "wire",
        lambda: internals.group_name("wire").__enter__(),
        dist.distributed_c10d,
    ),
    "ProcessGroup.Options._timeout": Case(
        lambda t: t.timeout == internals.timedelta(seconds=7),
        lambda: internals.set_timeout(BARE, internals.timedelta(seconds=7)),
    ),
    "FSDPModule._get_fsdp_state": Case(
        lambda t: internals.param_groups(t.sharded) == [t.group],
        lambda: internals.param_groups(BARE),
    ),
    "FSDPState._fsdp_param_group": Case(
        lambda t: internals.param_groups(state(_fsdp_param_group=None)) == [],
        lambda: internals.param_groups(state()),
    ),
    "FSDPState._fsdp_param_groups": Case(
        lambda t: internals.param_groups(state(_fsdp_param_groups=(1, 2))) == [1, 2]
    ),
    "FSDPState._state_ctx": Case(
        lambda t: internals.is_last_backward(t.sharded),
        lambda: internals.is_last_backward(state()),
    ),
    "FSDPStateContext.post_backward_final_callback_queued": Case(
        lambda t: not internals.is_inside_backward(t.sharded),
        lambda: internals.is_inside_backward(state(_state_ctx=BARE)),
    ),
    "FSDPStateContext.is_last_backward": Case(
        lambda t: internals.is_last_backward(t.sharded),
        lambda: internals.is_last_backward(state(_state_ctx=BARE)),
    ),
    "FSDPParamGroup.fsdp_params": Case(
        lambda t: len(internals.members(t.group)) == 2, lambda: internals.members(BARE)
    ),
    "FSDPParamGroup.modules": Case(
        lambda t: internals.module_of(t.group) is t.sharded, lambda: internals.module_of(BARE)
    ),
    "FSDPParamGroup.device": Case(
        lambda t: internals.reduce_device(t.group) == CPU, lambda: internals.reduce_device(BARE)
    ),
    "FSDPParamGroup.mesh_info": Case(
        lambda t: not internals.averages_replicas(t.group),
        lambda: internals.averages_replicas(BARE),
    ),
    "FSDPMeshInfo.shard_process_group": Case(
        lambda t: dist.get_world_size(internals.shard_group(t.group)) == 1,
        lambda: internals.shard_group(mesh()),
    ),
    "replicate_process_group": Case(
        lambda t: internals.averages_replicas(t.hybrid) and not internals.averages_replicas(t.group)
    ),
    "FSDPParamGroup.all_reduce_grads": Case(
        lambda t: internals.reduces_now(t.group), lambda: internals.reduces_now(BARE)
    ),
    "FSDPParamGroup.force_sum_reduction_for_comms": Case(
        lambda t: not internals.divides_after_hook(t.group),
        lambda: internals.divides_after_hook(BARE),
    ),
    "FSDPParamGroup._all_reduce_hook": Case(
        lambda t: internals.all_reduce_hook(t.group) is print,
        lambda: internals.all_reduce_hook(BARE),
    ),
    "FSDPParam.mp_policy": Case(
        lambda t: internals.reduce_dtype(t.group, t.parameter) == torch.bfloat16,
        lambda: internals.reduce_dtype(BARE, SimpleNamespace(sharded_param=torch.ones(1))),
    ),
    "FSDPParam.sharded_param": Case(
        lambda t: internals.shard(t.parameter).to_local().shape == (4, 3),
        lambda: internals.shard(BARE),
    ),
    "FSDPParam.sharded_size": Case(
        lambda t: internals.shard_size(t.parameter) == (4, 3), lambda: internals.shard_size(BARE)
    ),
    "FSDPParam.padded_sharded_param_size": Case(
        lambda t: internals.padded_shard_size(t.parameter) == (4, 3),
        lambda: internals.padded_shard_size(BARE),
    ),
    "FSDPParam.contiguous_sharded_stride": Case(
        lambda t: internals.shard_stride(t.parameter) == (3, 1),
        lambda: internals.shard_stride(BARE),
    ),
    "FSDPParam.is_dtensor": Case(
        lambda t: not internals.is_tensor_parallel(t.parameter),
        lambda: internals.is_tensor_parallel(BARE),
    ),
    "sharded_grad_dtype": Case(
        lambda t: internals.gradient_dtype(t.parameter) in (None, torch.float32)
    ),
    "FSDPParam._module_info": Case(
        lambda t: internals.owner_of(t.parameter) == (t.sharded, "weight"),
        lambda: internals.owner_of(BARE),
    ),
    "ParamModuleInfo.module": Case(
        lambda t: internals.owner_of(t.parameter)[0] is t.sharded,
        lambda: internals.owner_of(SimpleNamespace(_module_info=BARE)),
    ),
    "ParamModuleInfo.param_name": Case(
        lambda t: internals.owner_of(t.parameter)[1] == "weight",
        lambda: internals.owner_of(
            SimpleNamespace(_module_info=SimpleNamespace(module=t_module()))
        ),
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo": Case(
        lambda t: internals.storage_info()("a.distcp", 0, 1).relative_path == "a.distcp",
        internals.storage_info,
        filesystem,
    ),
    "torch.distributed.checkpoint.filesystem._StoragePrefix": Case(
        lambda t: internals.storage_prefix("a").prefix == "a",
        lambda: internals.storage_prefix("a"),
        filesystem,
    ),
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": Case(
        lambda t: "TORCH_CHANNELS_LAST" in internals.memory_format_codes().__members__,
        internals.memory_format_codes,
        metadata,
    ),
    "_get_layout": Case(
        lambda t: (
            hasattr(torch.serialization, internals.LAYOUT[1])
            and internals.LAYOUT[0] == torch.serialization.__name__
        )
    ),
    "torch._subclasses": Case(
        lambda t: hasattr(internals.fake_tensors(), "FakeTensorMode"), internals.fake_tensors, torch
    ),
    "triton.JITFunction.fn": Case(
        lambda t: internals.kernel_function(t.kernel) is one,
        lambda: internals.kernel_function(BARE),
    ),
    "triton.interpreter.kwargs": Case(
        lambda t: internals.kernel_options(t.kernel)["do_not_specialize"] == ["n"]
    ),
    "triton.CompiledKernel.run": Case(
        lambda t: "run" in dir(t.compilation), lambda: internals.relaunch(BARE)
    ),
    "triton.CompiledKernel.function": Case(
        lambda t: "function" in names_of(t.compilation),
        lambda: internals.relaunch(SimpleNamespace(run=print)),
    ),
    "triton.CompiledKernel.packed_metadata": Case(
        lambda t: "packed_metadata" in names_of(t.compilation),
        lambda: internals.relaunch(SimpleNamespace(run=print, function=print)),
    ),
    "triton.JITFunction.warmup": Case(
        lambda t: hasattr(t.kernel, "warmup"), lambda: internals.compile_only(BARE, (), {})
    ),
    "triton.runtime.driver.set_active": Case(
        lambda t: hasattr(triton_driver(), "set_active"),
        lambda: internals.without_a_gpu((9, 0)),
        lambda: triton_driver(),
    ),
    "triton.knobs.cache.dir": Case(
        lambda t: "cache" in internals.kernel_cache(), lambda: without_cache_dir()
    ),
    "torch.nn.modules.batchnorm._BatchNorm": Case(
        lambda t: isinstance(nn.BatchNorm2d(1), internals.batch_norm()),
        internals.batch_norm,
        batchnorm,
    ),
    "torch._C._profiler._ExperimentalConfig": Case(
        lambda t: internals.profile_all_threads() is not None,
        internals.profile_all_threads,
        torch._C._profiler,
    ),
    # torch loads it by itself when it is asked for, so it cannot be taken away.
    "torch._dynamo": Case(lambda t: keeps_forms()),
}


def triton_driver():
    """The class of Triton's driver. Triton reads the environment when it is imported: not above."""
    from triton.runtime.driver import driver

    return type(driver)


def without_cache_dir():
    """Ask for the folder while its descriptor is away; pytest does not see it in the class."""
    from triton import knobs

    kind = type(knobs.cache)
    descriptor = vars(kind)["dir"]
    del kind.dir
    try:
        internals.kernel_cache()
    finally:
        kind.dir = descriptor


def t_module():
    return nn.Linear(1, 1)


def keeps_forms():
    import torch._dynamo

    before = torch._dynamo.config.recompile_limit
    internals.keep_compiled_forms(before + 1)
    after = torch._dynamo.config.recompile_limit
    internals.keep_compiled_forms(before)
    return after == before + 1


def copies_each():
    place = torch.zeros(2)
    internals.copy_each([place], [torch.ones(2)])
    return place.tolist() == [1, 1]


def profiles():
    with profiler.profile():
        inside = internals.is_profiled()
    return inside and not internals.is_profiled()


def named_group():
    usual = dist.distributed_c10d._process_group_name
    with internals.group_name("wire"):
        name = dist.distributed_c10d._process_group_name([0, 1], use_hashed_name=True)
    return name if dist.distributed_c10d._process_group_name is usual else "not put back"


def one(x, n): ...


def names_of(kind):
    """The attributes of a class, and those that its `__init__` sets."""
    return {*dir(kind), *kind.__init__.__code__.co_names}


def hook(state, bucket):
    raise AssertionError("nothing is reduced")


def torch_objects():
    """What torch makes of a small model, in every way that gradwire meets it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    t = SimpleNamespace()
    if HAS_TRITON:
        from triton.compiler import CompiledKernel
        from triton.runtime.jit import JITFunction

        t.kernel, t.compilation = JITFunction(one, do_not_specialize=["n"]), CompiledKernel
    t.ddp = DistributedDataParallel(nn.Linear(3, 4))
    t.hooked = DistributedDataParallel(nn.Linear(3, 4))
    t.hooked.register_comm_hook(None, hook)
    ended = DistributedDataParallel(nn.Linear(3, 4))
    with dist.algorithms.join.Join([ended], divide_by_initial_world_size=False):
        t.joined = internals.is_joining(ended)
        t.divided = internals.divides_by_all_ranks(ended)
        ended(torch.ones(1, 3)).sum().backward()
    t.told = nn.Linear(3, 4)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(t.told, ["bias"])
    t.stepping = nn.Linear(3, 4)
    _apply_optimizer_in_backward(torch.optim.SGD, t.stepping.parameters(), {"lr": 0.1})
    net = nn.Linear(3, 4)
    t.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    t.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    t.scaler.scale(net(torch.ones(1, 3)).sum()).backward()
    t.scaler.unscale_(t.optimizer)
    options = dist.ProcessGroupGloo._Options()
    internals.set_timeout(options, internals.timedelta(seconds=7))
    t.timeout = options._timeout
    t.sharded = fully_shard(nn.Linear(3, 4), mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    t.sharded.set_all_reduce_hook(print)
    (t.group,) = internals.param_groups(t.sharded)
    t.parameter = internals.members(t.group)[0]
    both = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    (t.hybrid,) = internals.param_groups(fully_shard(nn.Linear(3, 4), mesh=both))
    return t


def ask_all(rank):
    """By name, what became of the function that needs it."""
    t = torch_objects()
    answers = {}
    for name, case in CASES.items():
        try:
            answers[name] = "" if case.works(t) else "another answer"
        except Exception as error:
            answers[name] = f"{type(error).__name__}: {error}"
    return answers


@pytest.fixture(scope="module")
def answers(ranks):
    return ranks.run(1, ask_all)[0]


@pytest.mark.parametrize("name", CASES)
def test_this_torch_has(name, answers):
    if name.startswith("triton") and not HAS_TRITON:
        pytest.skip("Triton is not installed")
    assert not answers[name], f"torch {torch.__version__}: {name}: {answers[name]}"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.without])
def test_a_torch_without_it_is_one_line(name, monkeypatch):
    case = CASES[name]
    if name.startswith("triton") and not HAS_TRITON:
        pytest.skip("Triton is not installed")
    if case.home is not None:
        home = case.home() if isinstance(case.home, FunctionType) else case.home
        monkeypatch.delattr(home, name.rpartition(".")[2], raising=False)
    with pytest.raises(VersionError) as caught:
        case.without()
    oldest, newest = (".".join(map(str, version)) for version in internals.KNOWN_TORCH)
    line = str(caught.value)
    assert f"torch {torch.__version__} has no {name}," in line
    assert f"tested with torch {oldest} to {newest}" in line
    assert "\n" not in line


PACKAGE = Path(gradwire.__file__).parent
ASKERS = {"getattr": 1, "hasattr": 1, "_get": 1, "_of_group": 1}
"""Functions that are given a name, and which argument it is."""
PLAIN = {
    "device",
    "dir",
    "enable",
    "fn",
    "function",
    "kwargs",
    "module",
    "modules",
    "run",
    "warmup",
}
"""Names of records of FSDP2 and Triton that other things have too."""


def names_asked(tree):
    """Attributes and words in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_name_has_a_case():
    tree = ast.parse((PACKAGE / "torch_internals.py").read_text())
    asked = {internals.COMPILED, internals.LAYOUT[1]}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and "__" not in node.attr:
            asked.add(node.attr)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            place = ASKERS.get(node.func.id)
            word = node.args[place] if place is not None else None
            if isinstance(word, ast.Constant):
                asked.add(word.value)
    homes = {"_C", "_profiler"}
    assert asked - homes == {name.rpartition(".")[2] for name in CASES}


def test_no_other_module_asks_for_them():
    private = {name.rpartition(".")[2] for name in CASES} - PLAIN - {"is_last_backward"}
    private |= {"_C", "_dynamo", "runtime"}
    wrong = set()
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE).as_posix()
        if place != "torch_internals.py":
            asked = names_asked(ast.parse(path.read_text()))
            wrong |= {(place, name) for name in asked if name in private}
    assert not wrong
