"""What the planner measures by itself."""

import pytest
import torch

from gradwire.plan import measure
from gradwire.plan.auto import SKIPPED, Auto
from gradwire.plan.measure import LARGE, measure_link, measure_machine, node_count
from gradwire.stages import Clock

CPU = torch.device("cpu")


def test_rate_and_latency_are_found_again(monkeypatch):
    """4 ranks, 20 ms and 10 MB/s: an all-gather takes 3 x 20 ms and 3 x its bytes / 10 MB/s."""
    now = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])

    def gather(mine):
        now[0] += 0.06 + 3 * mine.numel() / 1e7
        return mine

    rate, latency = measure_link(gather, 4, CPU)
    assert rate == pytest.approx(1e7, rel=0.01)
    assert latency == pytest.approx(0.02, rel=0.01)


@pytest.mark.parametrize(("slowest", "largest"), [(0.01, LARGE), (0.04, LARGE // 16)])
def test_ranks_agree_on_how_much_they_send(slowest, largest):
    """The slowest of them decides: this one is fast."""
    sizes = []

    def gather(mine):
        if mine.is_floating_point():
            return torch.tensor([[float(mine)], [slowest]])
        sizes.append(mine.numel())
        return mine

    measure_link(gather, 2, CPU)
    assert max(sizes) == largest


def test_one_rank_has_no_link():
    rate, latency = measure_link(lambda mine: mine, 1, CPU)
    assert (rate > 1e12, latency) == (True, 0)


def test_a_single_machines_ranks_count_as_nodes(monkeypatch):
    for local, nodes in (("4", 4), ("2", 2), ("3", 4), ("1", 4)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        assert node_count(4) == nodes


def test_the_memory_of_this_machine_is_measured():
    found = measure_machine(CPU)
    assert found.name == "this cpu"
    assert 1e7 < found.bandwidth < 1e12


def test_computing_is_what_is_left_of_a_step_without_the_exchange():
    """1 s before the first bucket, 2 s to the last, 5 s of waiting; first steps do not count."""
    auto, now = Auto({}), [0.0]
    clock = Clock(CPU)
    clock.mark = lambda: now[0]
    for step in range(8):
        now[0] += 100.0 if step <= SKIPPED else 1.0
        auto.begin(clock)
        now[0] += 2.0
        auto.mark("last")
        now[0] += 5.0
        auto.mark("done")
    assert auto.due
    assert auto.compute_seconds() == pytest.approx(3.0)
