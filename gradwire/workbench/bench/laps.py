"""Seconds of consecutive steps, and bytes that left this rank."""

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch


def lap_seconds(
    step: Callable[[], object], count: int, device: torch.device, lead: int = 1
) -> list[float]:
    """Return the seconds of each of `count` steps; `lead` more steps before them are not timed.

    On CUDA the steps are launched one after the other as in training, without waiting. Events
    between the steps give the time of each.
    """
    for _ in range(lead):
        step()
    if device.type != "cuda":
        times = [time.perf_counter()]
        for _ in range(count):
            step()
            times.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(times)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]


def round_means(seconds: Sequence[float], period: int) -> list[float]:
    """Return the mean step of each round of `period` steps."""
    return [sum(seconds[i : i + period]) / period for i in range(0, len(seconds), period)]


def interface_bytes_sent(interface: str) -> int:
    """Return the bytes that have left by `interface`, headers included; 0 if it is absent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            # The ninth number of a line is "bytes transmitted".
            return int(numbers.split()[8])
    return 0


def time_quantiles(times: Sequence[float]) -> dict[str, float]:
    """Return p20, median and p80."""
    shares = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    cuts = torch.quantile(torch.tensor(times, dtype=torch.float64), shares).tolist()
    return dict(zip(("p20", "median", "p80"), [round(x, 7) for x in cuts], strict=True))
