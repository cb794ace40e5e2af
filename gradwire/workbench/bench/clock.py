"""Times of repeated calls: the median, with the spread beside it."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call: the median (ms), and the 20th, 80th and 90th percentiles."""

    ms: float
    p20: float
    p80: float
    p90: float

    @classmethod
    def from_times(cls, times: Sequence[float]) -> "Timing":
        """Return the timing of calls that took `times` milliseconds."""
        cuts = statistics.quantiles(times, n=10) if len(times) > 1 else [times[0]] * 9
        return cls(statistics.median(times), cuts[1], cuts[7], cuts[8])


def time_calls(
    calls: Sequence[Callable[[], object]], device: torch.device, repeat: int, warmup: int
) -> Timing:
    """Measure the time of one call; `calls` do the same on different memory and take turns.

    On CUDA the calls are launched one after the other without waiting, as in a training step.
    Events between the calls give the time of each. Where launching a call takes longer than
    running it, the time to launch is measured.
    """
    in_turn = itertools.cycle(calls)
    for _ in range(max(warmup, len(calls))):
        next(in_turn)()
    if device.type != "cuda":
        return Timing.from_times([_seconds(next(in_turn)) * 1e3 for _ in range(repeat)])
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 1)]
    torch.cuda.synchronize(device)
    marks[0].record()
    for mark in marks[1:]:
        next(in_turn)()
        mark.record()
    torch.cuda.synchronize(device)
    return Timing.from_times([a.elapsed_time(b) for a, b in itertools.pairwise(marks)])


def _seconds(call: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def capture_graph(call: Callable[[], object], times: int = 10) -> Callable[[], object]:
    """Capture `times` calls as one CUDA graph, and return its replay.

    A replay takes the device's time for the calls, without the host's time to launch each.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # Once before the capture: a kernel that compiles cannot be captured.
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(times):
            call()
    return graph.replay
