"""attach makes process groups of its own; after detach they do not add up."""

import gc
import itertools
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import ConfigError, ExchangeError
from gradwire.integrate.ddp import thread as ordered
from tests.integrate import models
from tests.integrate.fsdp import models as sharded_models

ROUNDS = 4


def known():
    """How many groups torch.distributed knows."""
    return len(dist.distributed_c10d._world.pg_map)


def rounds(attach, train):
    """The groups before, and after each round of attach, a step, detach, and until it is gone."""
    counts = [known()]
    for turn in range(ROUNDS):
        wire = attach()
        train(4 * turn, 2)
        sent = wire.stats().bytes_sent
        wire.detach()
        train(4 * turn + 2, 2)
        assert wire.steps == 3, "still attached"
        assert sent > 0
        counts.append(known())
    return counts, wire


def on_ddp(rank, folder, parts, fields):
    """`parts`: the ranks of each process group of a DDP model."""
    group = dist.group.WORLD
    if parts:
        group = [dist.new_group(part) for part in parts][[rank in p for p in parts].index(True)]
    ddp = DistributedDataParallel(models.model(), process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    counts, wire = rounds(
        lambda: gradwire.attach(ddp, density=0.01, dense_below=0, **fields),
        lambda start, steps: models.train(ddp, rank, steps, start, optimizer=optimizer),
    )
    # Trainers save the wire they know, whatever has become of it.
    place = folder / str(dist.get_process_group_ranks(group)[0])
    gradwire.save(wire, place)
    gradwire.load(wire, place)
    return counts, models.flat(ddp).numpy().tobytes()


@pytest.mark.parametrize("fields", [{}, {"exchange": "hierarchical", "local": 2}])
def test_ddp_uses_its_groups_again(ranks, tmp_path, fields):
    results = ranks.run(2, on_ddp, tmp_path, [], fields)
    assert len({weights for _, weights in results}) == 1
    for counts, _ in results:
        # Its own, and two of a hierarchy.
        assert counts[1:] == [counts[0] + (3 if fields else 1)] * ROUNDS


@pytest.mark.parametrize("fields", [{}, {"exchange": "hierarchical", "local": 1}])
def test_ddp_on_a_part_of_the_ranks_uses_its_group_again(ranks, tmp_path, fields):
    results = ranks.run(4, on_ddp, tmp_path, [[0, 1], [2, 3]], fields)
    for pair in (results[:2], results[2:]):
        assert len({weights for _, weights in pair}) == 1
    for counts, _ in results:
        assert len(set(counts[1:])) == 1


def on_shards(rank):
    axes = sharded_models.mesh()
    net = sharded_models.sharded(sharded_models.model(), axes["shard"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    group = axes["replicate"].get_group()
    counts, _ = rounds(
        lambda: gradwire.attach(net, replicate_group=group, density=0.02, dense_below=0),
        lambda start, steps: sharded_models.train(net, steps, start, optimizer),
    )
    return counts, sharded_models.flat(net)


def test_sharded_models_use_their_groups_again(ranks):
    results = ranks.run(4, on_shards)
    for counts, _ in results:
        assert counts[1:] == [counts[0] + 2] * ROUNDS
    for replicas in sharded_models.same_shard(results):
        assert torch.equal(replicas[0][1], replicas[1][1])


def two_at_once(rank):
    """Two wires on the same ranks have two groups, and a third takes the one that is free."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    built = [
        DistributedDataParallel(models.model(seed), process_group=pairs[rank // 2])
        for seed in range(2)
    ]
    first, second = (gradwire.attach(ddp, density=0.05, dense_below=0) for ddp in built)
    apart = first.group.process_group is not second.group.process_group
    mine = first.group.process_group
    first.detach()
    for ddp in built:
        models.train(ddp, rank, 3)
    again = gradwire.attach(built[0], density=0.05, dense_below=0)
    reused = again.group.process_group is mine
    other = gradwire.attach(
        DistributedDataParallel(models.model(), process_group=pairs[rank // 2]), timeout=60
    )
    for ddp in built:
        models.train(ddp, rank, 2)
    for wire in (again, second, other):
        wire.close()
    return apart, reused, [models.flat(ddp).numpy().tobytes() for ddp in built]


def test_a_group_that_is_in_use_is_not_taken(ranks):
    results = ranks.run(4, two_at_once)
    assert [r[:2] for r in results] == [(True, True)] * 4
    for pair in (results[:2], results[2:]):
        assert pair[0][2] == pair[1][2]


def held():
    """The descriptors and the threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def closed(rank, way, fields):
    """What the process holds after each round of attach, two steps and close."""
    counts = []
    for _ in range(ROUNDS):
        net = models.model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if way == "local steps":
            wire = gradwire.local_steps(net, optimizer, every=1, density=0.05)
            for step in range(2):
                net(models.data(rank, step)).square().mean().backward()
                optimizer.step()
                wire.step()
        else:
            ddp = DistributedDataParallel(net)
            if way == "attach":
                wire = gradwire.attach(ddp, density=0.01, dense_below=0, **fields)
            else:
                wire = gradwire.State(density=0.01, dense_below=0)
                ddp.register_comm_hook(wire, gradwire.ddp_hook)
            models.train(ddp, rank, 2)
            del ddp
        wire.close()
        dist.barrier()
        counts.append(held())
        end = time.monotonic() + 5
        while counts[-1] > counts[min(1, len(counts) - 1)] and time.monotonic() < end:
            time.sleep(0.01)  # a thread that was joined is a moment longer in /proc
            counts[-1] = held()
    return counts


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts in /proc")
@pytest.mark.parametrize(
    ("way", "fields"),
    [
        ("attach", {}),
        ("attach", {"exchange": "hierarchical", "local": 1}),
        ("hook", {}),
        ("local steps", {}),
    ],
    ids=str,
)
def test_close_gives_threads_and_descriptors_back(ranks, way, fields):
    for counts in ranks.run(2, closed, way, fields):
        # Fewer are allowed: what an earlier test left may go meanwhile.
        for before, after in itertools.pairwise(counts[1:]):
            assert all(b >= a for b, a in zip(before, after, strict=True)), counts


def dropped(rank, way):
    """What the process holds after each of many wires that nobody has closed."""
    counts = []
    gc.disable()  # Python would collect some of them, or none, as it happens.
    try:
        for _ in range(16):
            drop_one(rank, way)
            dist.barrier()
            counts.append(held())
    finally:
        gc.enable()
    return counts


def drop_one(rank, way):
    net = models.model()
    if way == "local steps":
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        gradwire.local_steps(net, optimizer, every=1, density=0.05).exchange()
    elif way == "average":
        gradwire.average([torch.ones(2000)], gradwire.State(density=0.01))
    else:
        ddp = DistributedDataParallel(net)
        if way == "attach":
            gradwire.attach(ddp, density=0.01, dense_below=0)
            ddp.cycle = [ddp]  # as a trainer that a model knows
        else:
            ddp.register_comm_hook(gradwire.State(density=0.01), gradwire.ddp_hook)
        models.train(ddp, rank, 1)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts in /proc")
@pytest.mark.parametrize("way", ["attach", "hook", "local steps", "average"])
def test_wires_that_are_dropped_give_threads_and_descriptors_back(ranks, way):
    for counts in ranks.run(2, dropped, way):
        most = [max(held) for held in zip(*counts[:11], strict=True)]
        assert all(now <= then for now, then in zip(counts[-1], most, strict=True)), counts


REFUSED = {
    "fields differ": lambda rank, net: gradwire.attach(
        DistributedDataParallel(net), density=0.1 + 0.1 * rank
    ),
    "a rule without a parameter": lambda rank, net: gradwire.attach(
        DistributedDataParallel(net), density=0.1, dense=("nothing*",)
    ),
    "local steps differ": lambda rank, net: gradwire.local_steps(
        net, torch.optim.SGD(net.parameters(), lr=0.1), every=1 + rank
    ),
}


def refused(rank, way):
    """What the process holds after each attempt to attach."""
    counts = []
    for _ in range(ROUNDS):
        with pytest.raises(ConfigError):
            REFUSED[way](rank, models.model())
        dist.barrier()
        counts.append(held())
    return counts


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts in /proc")
@pytest.mark.parametrize("way", REFUSED)
def test_a_refused_attach_gives_them_back_too(ranks, way):
    for counts in ranks.run(2, refused, way):
        for before, after in itertools.pairwise(counts[1:]):
            assert all(b >= a for b, a in zip(before, after, strict=True)), counts


def closed_by_one(rank):
    """Rank 0 has closed two wires and rank 1 only one of them when the next is attached."""
    wires = [models.wrapped()[1] for _ in range(2)]
    groups = [id(wire.group.process_group) for wire in wires]
    wires[0].close()
    if rank == 0:
        wires[1].close()
    _, third = models.wrapped()
    taken = groups.index(id(third.group.process_group))
    _, fourth = models.wrapped()
    fresh = id(fourth.group.process_group) not in groups
    wires[1].close()
    third.close()
    fourth.close()
    return taken, fresh


def test_only_what_every_rank_gave_back_is_used_again(ranks):
    assert ranks.run(2, closed_by_one) == [(0, True)] * 2


def uneven(rank):
    """Ranks that know other numbers of groups attach, and make a group together afterwards."""
    pair = dist.new_group([0, 1])
    if rank == 1:
        dist.new_group([1], use_local_synchronization=True)
    if rank < 2:
        ddp = DistributedDataParallel(models.model(), process_group=pair)
        wire = gradwire.attach(ddp, density=0.1, dense_below=0)
        models.train(ddp, rank, 2)
        wire.close()
    ones = torch.ones(1)
    ddp, wire = models.wrapped()
    models.train(ddp, rank, 2)
    wire.close()
    dist.all_reduce(ones, group=wire.group.process_group)
    return int(ones)


def test_ranks_may_know_other_numbers_of_groups(ranks):
    assert ranks.run(3, uneven) == [3] * 3


def not_made(rank):
    """Rank 1 cannot make a communicator, so that rank 0 waits for it."""
    if rank == 1:
        dist.new_group = broken_store
    try:
        models.wrapped(timeout=1)
    except ExchangeError as error:
        return str(error)
    finally:
        dist.new_group = dist.distributed_c10d.new_group


def broken_store(*args, **kwargs):
    raise dist.DistStoreError("no store")


def test_a_communicator_that_is_not_made_is_one_line_with_rank_and_stage(ranks):
    said = ranks.run(2, not_made)
    for rank, line in enumerate(said):
        words = f"rank {rank} of 2: a communicator of ranks [0, 1] failed in stage connect."
        assert line.startswith(words)
        assert "\n" not in line
    assert "Every rank is alive" in said[0]
    assert said[1].endswith("(torch: no store)")


def hanging(rank):
    """A wire closed while its thread is busy: its communicator is not used again."""
    _, wire = models.wrapped()
    group = wire.group.process_group
    release = threading.Event()
    wire.engine._thread.submit(release.wait)
    ordered.PATIENCE = 0.1
    try:
        wire.close()
    finally:
        ordered.PATIENCE = 10.0
        release.set()
    _, other = models.wrapped()
    same = other.group.process_group is group
    other.close()
    return same


def test_a_communicator_that_hangs_is_not_used_again(ranks):
    assert ranks.run(2, hanging) == [False, False]
