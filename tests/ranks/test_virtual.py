"""Virtual workers: threads that take turns, and the cluster made of them."""

import multiprocessing

import pytest
import torch

import gradwire
from gradwire.ranks.virtual import VirtualRanks


def test_virtual_workers_meet_several_times_in_order():
    ranks = VirtualRanks(3)

    def work(rank):
        group, seen = ranks.groups[rank], []
        for i in range(4):
            seen.append(group.all_gather(torch.tensor([10 * i + rank])).view(-1).tolist())
            seen.append(int(group.all_reduce(torch.tensor(i + rank))))
        return seen

    expected = [x for i in range(4) for x in ([10 * i, 10 * i + 1, 10 * i + 2], 3 * i + 3)]
    assert ranks.run(work) == [expected] * 3


def test_virtual_workers_have_the_threads_of_whoever_calls_them():
    ranks, before = VirtualRanks(2), torch.get_num_threads()
    try:
        for threads in (2, 1, 3):
            torch.set_num_threads(threads)
            assert ranks.run(lambda rank: torch.get_num_threads()) == [threads] * 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_virtual_workers_work_in_a_child_too():
    """A fork has no threads but its own, whatever the parent has kept."""
    ranks = VirtualRanks(2)
    assert ranks.run(lambda rank: rank) == [0, 1]
    child = multiprocessing.get_context("fork").Process(target=ranks.run, args=(abs,))
    child.start()
    child.join(20)
    hangs = child.is_alive()
    child.kill()
    assert not hangs
    assert child.exitcode == 0


def test_virtual_workers_survive_a_failure():
    cluster = gradwire.VirtualCluster(3, density=0.1)
    cluster.average([torch.ones(10)] * 3)
    with pytest.raises(ZeroDivisionError):
        cluster._ranks.run(lambda rank: 1 / (rank - 1))
    with pytest.raises(ZeroDivisionError):
        cluster._ranks.run(
            lambda r: cluster._ranks.groups[r].all_reduce(torch.ones(1)) / (r - 1 or 1 // 0)
        )
    cluster.average([torch.ones(10)] * 3)


def test_bad_input():
    with pytest.raises(ValueError, match="world_size must be a whole number of at least 1, got 0"):
        gradwire.VirtualCluster(0)
    cluster = gradwire.VirtualCluster(2, density=0.1)
    with pytest.raises(ValueError, match="one gradient a worker: 2, got 1"):
        cluster.average([torch.ones(4)])
    with pytest.raises(ValueError, match=r"gradient 1 has shape \(5,\), expected flat \(4,\)"):
        cluster.average([torch.ones(4), torch.ones(5)])
    with pytest.raises(ValueError, match=r"gradient 0 is torch.float64"):
        cluster.average([torch.ones(4).double()] * 2)
    cluster.average([torch.ones(4)] * 2)
    with pytest.raises(ValueError, match=r"rank must be in 0..1, got 2"):
        cluster.residual(2)
