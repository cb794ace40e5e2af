"""What attach refuses of sharded models, and what it says."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import AttachError, ConfigError
from tests.integrate.fsdp import models

FP16, FP32 = torch.float16, torch.float32


def build(what, axes):
    """The model and the group of one case."""
    shard, group, kw = axes["shard"], axes["replicate"].get_group(), {}
    net = models.model(dtype=torch.float64 if what == "float64" else FP32)
    if what == "plain":
        return net, group
    if what == "ddp":
        return DistributedDataParallel(net), group
    if what == "root not sharded":
        fully_shard(net.blocks[0], mesh=shard)
        return net, group
    if what == "meta":
        with torch.device("meta"):
            net = models.Net()
    if what == "2-D mesh":
        shard = axes
    if what == "fp16 reduction":
        kw["mp_policy"] = MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=FP16)
    if what == "fp16 from bf16":
        net = net.half()
        kw["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    models.sharded(net, shard, **kw)
    if what == "sum only":
        net.blocks[0].set_force_sum_reduction_for_comms(True)
    if what == "another hook":
        net.blocks[1].set_all_reduce_hook(lambda flat: None)
    if what == "frozen":
        net.requires_grad_(False)
    groups = {
        "no group": None,
        "a name": "replicate",
        "2-D group": axes,
        "the shard axis": axes["shard"].get_group(),
        "everyone": dist.group.WORLD,
    }
    return net, groups.get(what, group)


def refused(rank, what):
    axes = models.mesh()
    net, group = build(what, axes)
    if what == "crossed":
        # Rank 3 holds the other shard.
        pairs = [dist.new_group([0, 3]), dist.new_group([1, 2])]
        group = pairs[rank in (1, 2)]
    if what == "not a member":
        group = dist.new_group([rank - 1] if rank else [3], use_local_synchronization=False)
        group = dist.GroupMember.NON_GROUP_MEMBER if group is None else group
    wires = []
    try:
        for _ in range(2 if what == "twice" else 1):
            wires.append(gradwire.attach(net, replicate_group=group, density=0.1))
    except AttachError as error:
        return str(error)
    finally:
        for wire in wires:
            wire.close()
    return "attached"


CASES = {
    "nothing": "attached",
    "plain": 'got Net: call fully_shard(model, mesh=mesh["shard"]) first',
    "ddp": "has a process group of its own: leave replicate_group out",
    "root not sharded": "call fully_shard on the whole model too, last",
    "meta": "first.weight is on the meta device: materialise",
    "float64": "is torch.float64 and reduced in torch.float64",
    "fp16 reduction": "gradients are reduced in fp16, which FSDP divides after the hook; use Mixed",
    "fp16 from bf16": "is torch.float16 and reduced in torch.bfloat16",
    "sum only": "blocks.0: set_force_sum_reduction_for_comms divides after the hook",
    "another hook": "blocks.1 has an all-reduce hook already",
    "twice": "attached already: call wire.detach()",
    "frozen": "no parameter that needs a gradient",
    "no group": "needs replicate_group: give mesh",
    "a name": "must be a process group, got str",
    "2-D group": "replicate_group is a mesh of 2 axes",
    "the shard axis": "share ranks [",
    "everyone": "replicate_group [0, 1, 2, 3] and the shard mesh [",
    "crossed": "joins different parts of the model: rank ",
    "not a member": "this rank is not in replicate_group",
}


@pytest.mark.parametrize("what", CASES)
def test_what_cannot_work_is_refused_by_name(ranks, what):
    for message in ranks.run(4, refused, what):
        assert CASES[what] in message


def test_a_native_2d_mesh_is_shown_what_to_do_instead(ranks):
    for message in ranks.run(4, refused, "2-D mesh"):
        first, *lines = message.splitlines()
        assert "sharded on a 2-D mesh" in first
        assert [line.strip().partition("(")[0] for line in lines] == [
            "mesh = init_device_mesh",
            "fully_shard",
            "wire = gradwire.attach",
        ]


@pytest.mark.parametrize("fields", [{}, {"replicate_group": object()}], ids=["alone", "group"])
def test_fsdp1_is_shown_fully_shard(fields):
    old = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(old)
    old._fsdp_wrapped_module = nn.Linear(2, 2)
    with pytest.raises(AttachError, match=r"FSDP1 has no .* use fully_shard"):
        gradwire.attach(old, **fields)


def differing(rank, what):
    axes = models.mesh()
    net = models.sharded(models.model(), axes["shard"])
    odd = rank == 3 if what == "one rank" else rank % 2
    try:
        gradwire.attach(net, replicate_group=axes["replicate"], density=0.02 if odd else 0.01)
    except ConfigError as error:
        return str(error)
    return "attached"


def test_ranks_that_differ_all_get_an_error(ranks):
    messages = ranks.run(4, differing, "one rank")
    assert all("ranks differ in density: rank 1 has 0.02" in messages[r] for r in (1, 3))
    assert all("shard 1 of 2 failed" in messages[r] for r in (0, 2))
    for message in ranks.run(4, differing, "one shard"):
        assert "ranks differ in density: rank 1 has 0.02, rank 0 has 0.01" in message


def too_small(rank):
    axes = models.mesh(replicas=1)
    net = fully_shard(nn.Linear(4, 1), mesh=axes["shard"])
    try:
        gradwire.attach(net, replicate_group=axes["replicate"])
    except ConfigError as error:
        return str(error)
    return "attached"


def test_a_rank_without_entries_is_an_error_on_all_of_them(ranks):
    first, *rest = ranks.run(4, too_small)
    assert "shard 1 of 4 failed" in first
    assert all("holds no entry of the model: use fewer" in message for message in rest)


def offloaded(rank):
    """Parameters that live on the CPU take the same way."""
    net, wire = models.wrapped(shard={"offload_policy": CPUOffloadPolicy(pin_memory=False)})
    models.train(net, 2)
    wire.close()
    return models.flat(net)


def test_offloaded_parameters(ranks):
    results = ranks.run(4, offloaded)
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
