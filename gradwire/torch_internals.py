"""The private names of torch and Triton that gradwire uses: one function per name, with the reason.

A function raises VersionError if the name is missing. Some names are missing by design, for
instance on a model that was never compiled. Such a function documents the value that it returns.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable, profiler

from gradwire.errors import VersionError

KNOWN_TORCH = (2, 11), (2, 15)
"""The oldest and the newest release of torch with which the tests have passed."""

COMPILED = "_orig_mod"
"""The attribute in which torch.compile keeps the model, and thus a part of parameter names. Seen in
2.11 to 2.15."""

LAYOUT = "torch.serialization", "_get_layout"
"""The function that the records of a sharded checkpoint name in place of a layout. Seen in 2.11 to
2.15."""


def tested_range() -> str:
    """Return the releases that were tested, in words."""
    oldest, newest = (".".join(map(str, version)) for version in KNOWN_TORCH)
    return f"{oldest} to {newest}"


def torch_is_unknown() -> str:
    """Return the warning for a torch with which gradwire was not tested."""
    return (
        f"torch {torch.__version__} is not known to this gradwire, which was tested with "
        f"{tested_range()}: if anything looks odd, take one of those"
    )


def missing(name: str) -> VersionError:
    """Return the error for a torch, or the Triton that comes with it, that lacks a private name."""
    return VersionError(
        f"torch {torch.__version__} has no {name}, which gradwire relies on; it was tested with "
        f"torch {tested_range()}: install one of those"
    )


def _get(owner: object, name: str, home: str) -> Any:
    """Return the attribute of `owner`; `home` is the owner's name in the error."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise missing(f"{home}.{name}") from None


def check_steps() -> None:
    """Raise VersionError if torch lacks a name that every step needs."""
    _get(torch, "_foreach_copy_", "torch")
    _get(profiler, "_is_profiler_enabled", "torch.autograd.profiler")
    _get(dist.ProcessGroup, "_get_backend", "ProcessGroup")
    _get(dist.distributed_c10d, "_get_default_store", "torch.distributed.distributed_c10d")
    if torch.cuda.is_available():
        raw_stream(torch.cuda.current_device())


def check_sharded_steps(module: Any) -> None:
    """Raise VersionError if torch lacks a name that every step of a sharded model needs."""
    graph_task()
    execution_engine()
    is_inside_backward(module)
    is_last_backward(module)


# --- streams, autograd, profiler -------------------------------------------------------------


def raw_stream(device: int) -> int:
    """Return the number of the current CUDA stream.

    `torch.cuda.current_stream` takes four times as long as recording an event. Seen in 2.11 to
    2.15.
    """
    try:
        return int(torch._C._cuda_getCurrentRawStream(device))
    except AttributeError:
        raise missing("torch._C._cuda_getCurrentRawStream") from None


def current_device() -> int:
    """Return the number of the current CUDA device.

    `torch.cuda.current_device` first asks if CUDA is initialised, at every launch. Seen in 2.11 to
    2.15.
    """
    try:
        return int(torch._C._cuda_getDevice())
    except AttributeError:
        raise missing("torch._C._cuda_getDevice") from None


def copy_each(places: list[Tensor], values: list[Tensor] | tuple[Tensor, ...]) -> None:
    """Copy each value to its place.

    On CUDA this is a single launch, and the public `copy_` is a launch per tensor. Seen in 2.11 to
    2.15.
    """
    try:
        torch._foreach_copy_(places, values)
    except AttributeError:
        raise missing("torch._foreach_copy_") from None


def is_profiled() -> bool:
    """Return True while a profiler records.

    Otherwise a profiler's range would cost host time at every stage. Seen in 2.11 to 2.15.
    """
    try:
        return profiler._is_profiler_enabled
    except AttributeError:
        raise missing("torch.autograd.profiler._is_profiler_enabled") from None


def graph_task() -> int:
    """Return the number of the backward pass that runs, -1 outside of one.

    The number tells if a unit is reduced twice in one backward pass. Seen in 2.11 to 2.15.
    """
    return int(_get(torch._C, "_current_graph_task_id", "torch._C")())


def execution_engine() -> Any:
    """Return autograd's engine, whose `queue_callback` calls at the end of a backward pass.

    FSDP2 ends its backward pass with the same call. Seen in 2.11 to 2.15.
    """
    return _get(Variable, "_execution_engine", "torch.autograd.Variable")


# --- DistributedDataParallel ---------------------------------------------------------------------


def reduced_parameters(ddp: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that DDP reduces, in DDP's order.

    Only DDP knows the parameters that the user excluded. Seen in 2.11 to 2.15.
    """
    parameters, _ = _get(ddp, "_build_params_for_reducer", "DistributedDataParallel")()
    return list(parameters)


def has_hook(ddp: nn.Module) -> bool:
    """Return True if a communication hook is registered.

    DDP takes one hook for good, and reports it only by an error. A copy of a model lists the hook
    of the original, and its reducer has none: only the record for logging shows that. The list was
    seen in 2.11 to 2.15, the record in 2.13 and 2.15.
    """
    if not _get(ddp, "_comm_hooks", "DistributedDataParallel"):
        return False
    return bool(_get(ddp, "_get_ddp_logging_data", "DistributedDataParallel")().get("comm_hook"))


def has_python_reducer(ddp: nn.Module) -> bool:
    """Return True if torch.compile's python_reducer has replaced DDP's reducer.

    The python_reducer passes hooks no bucket. Seen in 2.11 to 2.15.
    """
    return bool(_get(ddp, "_use_python_reducer", "DistributedDataParallel"))


def is_joining(ddp: nn.Module) -> bool:
    """Return True inside Join, where ranks that have no more data take no steps.

    Seen in 2.11 to 2.15.
    """
    return bool(_get(_get(ddp, "_join_config", "DistributedDataParallel"), "enable", "_JoinConfig"))


def divides_by_all_ranks(ddp: nn.Module) -> bool:
    """Return False inside a Join that divides by the ranks that are left.

    DDP has the attribute only after its first Join. Seen in 2.11 to 2.15.
    """
    return getattr(ddp, "_divide_by_initial_world_size", True) is not False


def ignored_names(model: nn.Module) -> Sequence[str]:
    """Return the names of the parameters and buffers that the user excluded from DDP.

    A model has the attribute only if the user excluded some. Seen in 2.11 to 2.15.
    """
    names: Sequence[str] = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    return names


def steps_in_backward(parameter: Tensor) -> bool:
    """Return True if an optimiser steps in the backward pass, before gradients are averaged.

    torch marks only the parameters of such an optimiser. Seen in 2.11 to 2.15.
    """
    return hasattr(parameter, "_in_backward_optimizers")


def uncompiled(model: Any) -> Any:
    """Return the model inside torch.compile's module, or the model itself.

    The class of the module is in torch._dynamo, which takes seconds to import. Seen in 2.11 to
    2.15.
    """
    return getattr(model, COMPILED, model)


# --- optimisers and GradScaler -------------------------------------------------------------------


def takes_step_hooks(optimizer: object) -> bool:
    """Return True for an optimiser whose `step` runs hooks.

    A wrapper such as Accelerate's is an Optimizer without hooks. Seen in 2.11 to 2.15.
    """
    return hasattr(optimizer, "_optimizer_step_post_hooks")


def scale_of(scaler: Any) -> Tensor | None:
    """Return the GradScaler's scale on its device, None before its first use.

    The public `get_scale` waits for the device. Seen in 2.11 to 2.15.
    """
    scale: Tensor | None = _get(scaler, "_scale", "GradScaler")
    return scale


def overflows_of(scaler: Any) -> Mapping[int, Mapping[str, Any]]:
    """Return the GradScaler's notes per optimiser, which last until it updates its scale.

    No public call tells if a step was skipped. Seen in 2.11 to 2.15.
    """
    states: Mapping[int, Mapping[str, Any]] = _get(scaler, "_per_optimizer_states", "GradScaler")
    return states


# --- process groups --------------------------------------------------------------------------


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the object that runs a group's collectives on `device`.

    Only the backend has its options and abilities. Seen in 2.11 to 2.15.
    """
    return _get(group, "_get_backend", "ProcessGroup")(device)


def default_store() -> dist.Store:
    """Return the store that init_process_group uses.

    No public call returns the store. Seen in 2.11 to 2.15.
    """
    home = "torch.distributed.distributed_c10d"
    store: dist.Store = _get(dist.distributed_c10d, "_get_default_store", home)()
    return store


@contextlib.contextmanager
def group_name(name: str) -> Iterator[None]:
    """Within this context, torch gives a new process group this name.

    torch's own name has a count of the groups that a rank knows. Ranks with other counts would wait
    for each other. torch 2.14 and 2.15 also count groups of a part of the ranks, so that later
    groups of all ranks get different names. No public call takes a name. Seen in 2.11 to 2.15.
    """
    home: Any = dist.distributed_c10d
    usual = _get(home, "_process_group_name", "torch.distributed.distributed_c10d")
    home._process_group_name = lambda *_, **__: name
    try:
        yield
    finally:
        home._process_group_name = usual


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set the timeout in a backend's options.

    torch warns if the options and `new_group` have different timeouts. Seen in 2.11 to 2.15.
    """
    _get(options, "_timeout", "ProcessGroup.Options")
    options._timeout = timeout


# --- FSDP2: modules ------------------------------------------------------------------------------


def param_groups(module: Any) -> list[Any]:
    """Return the groups of parameters that FSDP2 reduces for a module, one hook per group.

    A hook gets only the flat shard, so its layout is read from the group. `_fsdp_param_group` was
    seen in 2.11, with one group at most. `_fsdp_param_groups` was seen in 2.12 to 2.15.
    """
    state = _fsdp_state(module)
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = _get(state, "_fsdp_param_group", "FSDPState")
    return [] if group is None else [group]


def is_inside_backward(module: Any) -> bool:
    """Return True from the first unit of a backward pass to FSDP2's own end of that pass.

    A backward pass inside another one ends earlier, while this is still True. Seen in 2.11 to 2.15.
    """
    context = _get(_fsdp_state(module), "_state_ctx", "FSDPState")
    return bool(_get(context, "post_backward_final_callback_queued", "FSDPStateContext"))


def is_last_backward(module: Any) -> bool:
    """Return False if the user has announced more micro-batches.

    `set_is_last_backward` has no public reader. Seen in 2.11 to 2.15.
    """
    context = _get(_fsdp_state(module), "_state_ctx", "FSDPState")
    return bool(_get(context, "is_last_backward", "FSDPStateContext"))


def _fsdp_state(module: Any) -> Any:
    """Return FSDP2's record of a module, which leads to all records below. Seen in 2.11 to 2.15."""
    return _get(module, "_get_fsdp_state", "FSDPModule")()


# --- FSDP2: groups of parameters -----------------------------------------------------------------


def _of_group(group: Any, name: str) -> Any:
    return _get(group, name, "FSDPParamGroup")


def members(group: Any) -> Sequence[Any]:
    """Return FSDP2's records of the parameters, in their order in the flat shard.

    Seen in 2.11 to 2.15.
    """
    parameters: Sequence[Any] = _of_group(group, "fsdp_params")
    return parameters


def module_of(group: Any) -> Any:
    """Return the module that a group of parameters belongs to. Seen in 2.11 to 2.15."""
    return _of_group(group, "modules")[0]


def reduce_device(group: Any) -> torch.device:
    """Return the device on which gradients are reduced. Seen in 2.11 to 2.15."""
    device: torch.device = _of_group(group, "device")
    return device


def shard_group(group: Any) -> dist.ProcessGroup:
    """Return the ranks that hold the shards of one replica. Seen in 2.11 to 2.15."""
    mesh = _of_group(group, "mesh_info")
    ranks: dist.ProcessGroup = _get(mesh, "shard_process_group", "FSDPMeshInfo")
    return ranks


def averages_replicas(group: Any) -> bool:
    """Return True if FSDP2 averages over replicas itself, before any hook.

    Only the mesh of such a model has a group of replicas. Seen in 2.11 to 2.15.
    """
    mesh = _of_group(group, "mesh_info")
    return getattr(mesh, "replicate_process_group", None) is not None


def reduces_now(group: Any) -> bool:
    """Return False if the user has switched the all-reduce off. Seen in 2.11 to 2.15."""
    return bool(_of_group(group, "all_reduce_grads"))


def divides_after_hook(group: Any) -> bool:
    """Return True after set_force_sum_reduction_for_comms. Seen in 2.11 to 2.15."""
    return bool(_of_group(group, "force_sum_reduction_for_comms"))


def all_reduce_hook(group: Any) -> Any:
    """Return the hook that `set_all_reduce_hook` has set, or None. Seen in 2.11 to 2.15."""
    return _of_group(group, "_all_reduce_hook")


def reduce_dtype(group: Any, parameter: Any) -> torch.dtype:
    """Return the dtype of the flat shard that a hook gets.

    FSDPParamGroup.mp_policy was seen in 2.11 to 2.14, FSDPParam.mp_policy in 2.15.
    """
    shard_dtype: torch.dtype = shard(parameter).dtype
    if hasattr(group, "mp_policy"):
        policy = group.mp_policy
        return policy.reduce_dtype or policy.param_dtype or shard_dtype
    # If every parameter has a policy, gradients are reduced in the dtype of the parameters.
    return _get(parameter, "mp_policy", "FSDPParam").reduce_dtype or shard_dtype


# --- FSDP2: parameters -----------------------------------------------------------------------


def shard(parameter: Any) -> Any:
    """Return the DTensor of this rank's shard, which the optimiser steps. Seen in 2.11 to 2.15."""
    return _get(parameter, "sharded_param", "FSDPParam")


def shard_size(parameter: Any) -> torch.Size:
    """Return the shape of this rank's shard. Seen in 2.11 to 2.15."""
    size: torch.Size = _get(parameter, "sharded_size", "FSDPParam")
    return size


def padded_shard_size(parameter: Any) -> torch.Size:
    """Return the shape of a shard with its padding, as in the flat shard. Seen in 2.11 to 2.15."""
    size: torch.Size = _get(parameter, "padded_sharded_param_size", "FSDPParam")
    return size


def shard_stride(parameter: Any) -> tuple[int, ...]:
    """Return the strides of a shard in the flat shard. Seen in 2.11 to 2.15."""
    return tuple(_get(parameter, "contiguous_sharded_stride", "FSDPParam"))


def is_tensor_parallel(parameter: Any) -> bool:
    """Return True for a parameter that was a DTensor before fully_shard. Seen in 2.11 to 2.15."""
    return bool(_get(parameter, "is_dtensor", "FSDPParam"))


def gradient_dtype(parameter: Any) -> torch.dtype | None:
    """Return the `grad_dtype` of a parameter, or None.

    Seen in 2.15; FSDP2 has no such dtype in earlier releases.
    """
    dtype: torch.dtype | None = getattr(parameter, "sharded_grad_dtype", None)
    return dtype


def owner_of(parameter: Any) -> tuple[nn.Module, str]:
    """Return the module that has a parameter, and the parameter's name in this module.

    FSDP2 swaps parameters and shards, so only its record knows the names. Seen in 2.11 to 2.15.
    """
    info = _get(parameter, "_module_info", "FSDPParam")
    module = _get(info, "module", "ParamModuleInfo")
    return module, str(_get(info, "param_name", "ParamModuleInfo"))


# --- sharded checkpoints -------------------------------------------------------------------------


def storage_info() -> type[Any]:
    """Return the class of a record that says in which file an entry lies.

    The reader unpickles only the known classes of records. Seen in 2.11 to 2.15.
    """
    from torch.distributed.checkpoint import filesystem

    kind: type[Any] = _get(filesystem, "_StorageInfo", "torch.distributed.checkpoint.filesystem")
    return kind


def storage_prefix(text: str) -> Any:
    """Return a plan's note of how the files of a rank begin.

    Each save needs a new prefix, so that no two files have the same name. Seen in 2.11 to 2.15.
    """
    from torch.distributed.checkpoint import filesystem

    return _get(filesystem, "_StoragePrefix", "torch.distributed.checkpoint.filesystem")(text)


def memory_format_codes() -> Any:
    """Return the enumeration by which records name memory formats. Seen in 2.11 to 2.15."""
    from torch.distributed.checkpoint import metadata

    return _get(metadata, "_MEM_FORMAT_ENCODING", "torch.distributed.checkpoint.metadata")


def fake_tensors() -> Any:
    """Return torch's module of tensors that have shapes and no contents.

    A wire's steps are rehearsed with them, without memory and without a GPU. Seen in 2.11 to 2.15.
    """
    import torch._subclasses.fake_tensor

    return _get(torch, "_subclasses", "torch").fake_tensor


# --- Triton ----------------------------------------------------------------------------------


def kernel_function(kernel: Any) -> Any:
    """Return the Python function of a kernel. Seen in Triton 3.6 and 3.7."""
    return _get(kernel, "fn", "triton.JITFunction")


def kernel_options(kernel: Any) -> Mapping[str, Any]:
    """Return the options that `triton.jit` was given, such as `do_not_specialize`.

    A kernel has them as attributes. Triton's interpreter keeps them in `kwargs`. Seen in Triton 3.6
    and 3.7.
    """
    return getattr(kernel, "kwargs", None) or vars(kernel)


def relaunch(compiled: Any) -> Callable[..., None]:
    """Return a function of (grid, device, *arguments) that launches on the current stream.

    It does not look at the arguments, as Triton's own launch does for half of a step at bucket
    sizes. Seen in Triton 3.6 and 3.7.
    """
    run = _get(compiled, "run", "triton.CompiledKernel")
    function = _get(compiled, "function", "triton.CompiledKernel")
    metadata = _get(compiled, "packed_metadata", "triton.CompiledKernel")

    def launch(grid: int, device: int, *args: Any) -> None:
        # The three None are the hooks of a profiler, which nobody uses here.
        run(grid, 1, 1, raw_stream(device), function, metadata, None, None, None, *args)

    return launch


def compile_only(kernel: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Compile what a launch with these arguments needs into Triton's cache, without a launch.

    The public way, `kernel.warmup`, also asks the driver which GPU this is. Seen in Triton 3.6, 3.7
    and 3.9.
    """
    _get(kernel, "warmup", "triton.JITFunction")(*args, grid=(1,), **options)


def without_a_gpu(capability: tuple[int, int]) -> None:
    """Let Triton compile in this process for a CUDA device that it need not have.

    Seen in Triton 3.6, 3.7 and 3.9.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    class Absent:
        get_current_target = staticmethod(lambda: target)
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)

    _get(driver, "set_active", "triton.runtime.driver")(Absent())


def kernel_cache() -> str:
    """Return the folder in which Triton keeps compiled kernels. Seen in Triton 3.6, 3.7 and 3.9."""
    from triton import knobs

    return str(_get(knobs.cache, "dir", "triton.knobs.cache"))


# --- the workbench ---------------------------------------------------------------------------


def batch_norm() -> type[nn.Module]:
    """Return the base of all batch norms, which has no public name. Seen in 2.11 to 2.15."""
    from torch.nn.modules import batchnorm

    kind: type[nn.Module] = _get(batchnorm, "_BatchNorm", "torch.nn.modules.batchnorm")
    return kind


def profile_all_threads() -> Any:
    """Return the profiler's setting that records threads other than the caller's.

    The exchange runs in a thread. Seen in 2.11 to 2.15.
    """
    config = _get(torch._C._profiler, "_ExperimentalConfig", "torch._C._profiler")
    return config(profile_all_threads=True)


def keep_compiled_forms(number: int) -> None:
    """Let torch keep so many compiled forms of one function; then it goes on without compiling.

    The setting is in torch._dynamo, which takes seconds to import. Seen in 2.11 to 2.15.
    """
    import torch._dynamo.config

    _get(torch, "_dynamo", "torch").config.recompile_limit = number
