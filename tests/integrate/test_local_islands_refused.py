"""Islands that cannot be: one clear line on every rank, and no rank waits."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import AttachError, ConfigError, GradwireError
from tests.integrate.fsdp import models as sharded
from tests.integrate.island_models import Islander, axes, wrapped


def groups(*members):
    """This rank's group out of these."""
    made = [dist.new_group(list(ranks)) for ranks in members]
    return next(g for g, ranks in zip(made, members, strict=True) if dist.get_rank() in ranks)


def tried(rank, kind, cases):
    """What each case says, on one mesh; and that nothing is left behind: the next one works."""
    mesh = axes()
    said = [attempt(rank, mesh, case, kind) for case in cases]
    if "stranger" not in cases:  # after which torch counts groups differently on each rank
        Islander(kind, method="dense", values="fp32", indices="int32").train(3).close()
    return said


def attempt(rank, mesh, case, kind):
    given, fields = {"replicate_group": mesh["replicate"].get_group()}, {"every": 2}
    net = sharded.model()
    if case == "sizes":
        island = groups([0, 1, 2], [3])
        given["replicate_group"] = groups([0, 3], [1], [2])
        model = DistributedDataParallel(net, process_group=island)
    elif case == "hsdp":
        model = fully_shard(net, mesh=mesh)
    elif case == "left out":
        model = sharded.sharded(net, mesh["shard"], ignored_params={net.last.bias})
        model = net
    elif case == "two meshes":
        fully_shard(net.blocks[0], mesh=init_device_mesh("cpu", (4,)))
        model = fully_shard(net, mesh=mesh["shard"])
    elif case == "plain":
        model = net
    elif case == "part":
        fully_shard(net.blocks[0], mesh=mesh["shard"])
        model = net
    elif case == "inside":
        net.last = DistributedDataParallel(net.last, process_group=mesh["shard"].get_group())
        model = net
    else:
        model = wrapped(kind, net, mesh)
    if case == "none":
        given = {}
    elif case == "cut":
        given = {"replicate_group": mesh["shard"].get_group()}
    elif case == "crossed":
        given = {"replicate_group": groups([0, 3], [1, 2])}
    elif case == "stranger":
        given = {"replicate_group": dist.new_group([0, 2])}
    elif case == "mesh":
        given = {"replicate_group": mesh}
    elif case == "word":
        given = {"replicate_group": "replicate"}
    elif case == "both":
        given["group"] = given["replicate_group"]
    elif case == "every":
        fields["every"] = 2 + rank // 2
    elif case == "inner every":
        fields["every"] = 2 + rank % 2
    elif case == "tiny":
        model = wrapped(kind, torch.nn.Linear(1, 1, bias=False), mesh)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        gradwire.local_steps(model, optimizer, dense_below=0, **given, **fields)
    except GradwireError as error:
        same = all(map(_equal, before, model.parameters()))
        dist.barrier()
        return type(error), str(error), same
    return None, "it was taken", False


def _equal(one, other):
    local = [t.to_local() if hasattr(t, "to_local") else t for t in (one, other)]
    return torch.equal(*local)


CASES = [
    ("fsdp2", "none", AttachError, "got a sharded model without replicate_group: give mesh["),
    ("ddp", "none", AttachError, "pass the plain model, or replicate_group=... for islands"),
    ("fsdp2", "cut", AttachError, "cuts the island [{a}, {b}] in two: it holds ranks [{a}, {b}"),
    ("ddp", "cut", AttachError, "cuts the island [{a}, {b}] in two: it holds ranks [{a}, {b}]"),
    ("ddp", "sizes", AttachError, "islands of different sizes: rank 0 is in one of 3 ranks"),
    ("fsdp2", "crossed", AttachError, "joins different parts of the model: rank"),
    ("ddp", "mesh", AttachError, "replicate_group is a mesh of 2 axes: give mesh["),
    ("fsdp2", "word", AttachError, "replicate_group must be a process group, got str"),
    ("ddp", "both", ConfigError, "got group and replicate_group: replicate_group is enough"),
    ("ddp", "plain", AttachError, "replicate_group is for a model in fully_shard or Distr"),
    ("fsdp2", "part", AttachError, "parts of the model are sharded: call fully_shard on"),
    ("ddp", "inside", AttachError, "with a DistributedDataParallel module inside: wrap the"),
    ("fsdp2", "hsdp", AttachError, "sharded on a mesh that holds the islands too"),
    ("fsdp2", "left out", AttachError, "last.bias is left out of fully_shard"),
    ("fsdp2", "two meshes", AttachError, "is sharded on another mesh than the other param"),
    ("fsdp2", "every", ConfigError, "ranks differ in every: rank 1 has 3, rank 0 has 2."),
    ("ddp", "inner every", ConfigError, "ranks differ in every: rank 1 has 3, rank 0 has 2."),
    ("ddp", "tiny", ConfigError, "rank 1 of an island of 2 holds no entry of the model"),
]


def check(kind, cases, got):
    rows = [row for row in CASES if row[0] == kind and row[1] in cases]
    for rank, said in enumerate(got):
        first = rank // 2 * 2
        for (_, case, error, words), (raised, text, same) in zip(rows, said, strict=True):
            assert words.format(a=first, b=first + 1) in text, case
            assert raised is error, case
            assert same, f"{case}: the weights were changed"
            # The lines to write in place of a mesh of two axes are several.
            assert "\n" not in text or case == "hsdp"


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_what_cannot_be_is_one_line_on_every_rank(ranks, kind):
    cases = [case for inside, case, _, _ in CASES if inside == kind]
    check(kind, cases, ranks.run(4, tried, kind, cases))


def test_a_rank_outside_of_its_group_is_named_on_every_rank(ranks):
    for ((raised, text, same),) in ranks.run(4, tried, "ddp", ["stranger"]):
        assert raised is AttachError
        assert "is not in its replicate_group: give mesh[" in text
        assert same
