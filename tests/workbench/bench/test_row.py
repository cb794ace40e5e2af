"""The numbers of a row, and the calls that a timing makes."""

import pytest
import torch

from gradwire.workbench.bench import clock
from gradwire.workbench.bench.clock import Timing, time_calls
from gradwire.workbench.bench.row import Row

CPU = torch.device("cpu")


def test_medians_with_the_spread_beside_them():
    times = [9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 100.0, 10.0]
    time = Timing.from_times(times)
    assert time.ms == 6
    assert (time.p20, time.p80) == pytest.approx((2.4, 9.6))
    assert Timing.from_times([3.0]) == Timing(3.0, 3.0, 3.0, 3.0)


def test_ratio_and_speed_are_of_this_rows_time():
    row = Row.from_timings(
        "topk", 10**6, 0.01, 10**4, 9000, Timing(4.0, 3.0, 5.0, 6.0), Timing(2.5, 2.0, 3.0, 3.0),
        12 * 10**6, CPU, "t3", 0.5, 0.25,
    )  # fmt: skip
    assert row.ratio == 1.6
    assert row.gbps == 3.0  # 12 MB in 4 ms
    assert (row.ms, row.p20, row.p80, row.floor_ms) == (4.0, 3.0, 5.0, 2.5)
    assert (row.size, row.k, row.achieved, row.density) == (10**6, 10**4, 9000, 0.01)
    assert (row.data, row.energy, row.recall) == ("t3", 0.5, 0.25)
    assert row.asdict()["method"] == "topk"
    assert f"torch {torch.__version__}" in row.versions


@pytest.mark.parametrize(("warmup", "before"), [(0, 3), (5, 5)])
def test_calls_take_turns_and_all_are_warm(warmup, before, monkeypatch):
    """Every call once before the clock starts, also where the warm-up is shorter."""
    made, timed = [], []

    def seconds(call):
        call()
        timed.append(made[-1])
        return len(timed) / 1000

    monkeypatch.setattr(clock, "_seconds", seconds)
    calls = [lambda i=i: made.append(i) for i in range(3)]
    assert time_calls(calls, CPU, 5, warmup).ms == 3
    assert made == [i % 3 for i in range(before + 5)]
    assert timed == made[before:]
