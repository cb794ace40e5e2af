"""Times of repeated calls: medians, not means, with the spread beside them."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call."""

    ms: float
    p20: float
    p80: float

    @classmethod
    def of(cls, times: Sequence[float]) -> "Timing":
        cuts = statistics.quantiles(times, n=5) if len(times) > 1 else [times[0]] * 4
        return cls(statistics.median(times), cuts[0], cuts[-1])


def measure(
    calls: Sequence[Callable[[], object]], device: torch.device, repeat: int, warmup: int
) -> Timing:
    """The time of one call; `calls` do the same on different memory and take turns.

    On CUDA the calls are launched one after the other without waiting, as a training step does;
    events between them give the time of each, and where launching is the slower side it counts.
    """
    turns = itertools.cycle(calls)
    for _ in range(max(warmup, len(calls))):
        next(turns)()
    if device.type != "cuda":
        return Timing.of([_seconds(next(turns)) * 1e3 for _ in range(repeat)])
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 1)]
    torch.cuda.synchronize(device)
    marks[0].record()
    for mark in marks[1:]:
        next(turns)()
        mark.record()
    torch.cuda.synchronize(device)
    return Timing.of([a.elapsed_time(b) for a, b in itertools.pairwise(marks)])


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def graphed(call: Callable[[], object], times: int = 10) -> Callable[[], object]:
    """`times` calls as one CUDA graph: what the device does, without what launching costs."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(times):
            call()
    return graph.replay
