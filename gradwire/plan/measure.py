"""What the planner can measure: this device's memory, and the links between the ranks at hand."""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gradwire.plan.machine import MACHINES, Machine

ENTRIES = 4_000_000
REPEAT, MANY = 7, 60
SMALL, LARGE = 8, 1 << 20
"""Bytes a rank puts into a probe: one is all latency, the other mostly transfer."""
LONGEST = 0.5
"""Seconds that a probe should take at most: on a slow link a smaller one does."""


def measure_machine(device: torch.device | None = None) -> Machine:
    """This device: the bandwidth of `e.add_(g)`; its FLOP/s are the table's, if it is there."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = MACHINES["cpu"]
    name = "this cpu"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        plain = name.lower().replace(" ", "").replace("-", "")
        fits = [m for n, m in MACHINES.items() if n.replace("-", "") in plain]
        known = max(fits, key=lambda m: len(m.name)) if fits else MACHINES["v100"]
    # Larger than a GPU's cache, smaller than what a full GPU has left.
    size = ENTRIES if device.type == "cpu" else 5 * ENTRIES
    gradient = torch.ones(size, dtype=torch.float32, device=device)
    residual = torch.zeros_like(gradient)
    seconds = _median(lambda: residual.add_(gradient), device)
    return replace(known, name=name, bandwidth=12 * size / seconds)


Gather = Callable[[Tensor], Tensor]


def measure_link(gather: Gather, ranks: int, device: torch.device) -> tuple[float, float]:
    """Payload bytes a second and seconds of latency between `ranks`, by all-gathers.

    seconds = (P - 1) latency + (P - 1) bytes / rate. A collective call; ranks measure their own
    numbers, so take one rank's for all.
    """
    if ranks == 1:
        return 1e15, 0.0

    def fits(seconds: float) -> int:
        """How often that fits, by the slowest: a gather that only some ranks call never ends."""
        slowest = float(gather(torch.tensor([seconds], dtype=torch.float32, device=device)).max())
        return int(LONGEST / max(slowest, 1e-9))

    small = _gather(gather, SMALL, device)
    # Short ones vary most.
    small = _gather(gather, SMALL, device, max(REPEAT, min(MANY, fits(small))))
    probe = _gather(gather, LARGE // 16, device)
    large, size = probe, LARGE // 16
    if fits(probe) >= 16:
        large, size = _gather(gather, LARGE, device), LARGE
    spent = max(1e-9, large - small)
    return (ranks - 1) * (size - SMALL) / spent, small / (ranks - 1)


def _gather(gather: Gather, size: int, device: torch.device, repeat: int = REPEAT) -> float:
    mine = torch.zeros(size, dtype=torch.uint8, device=device)
    return _median(lambda: gather(mine), device, repeat)


def _median(call: Callable[[], object], device: torch.device, repeat: int = REPEAT) -> float:
    """Median seconds of a call, the first ones left out."""
    times = []
    for _ in range(repeat + 2):
        _wait(device)
        begin = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def node_count(ranks: int) -> int:
    """As torchrun says; ranks of one machine count as nodes: it is their link that was measured."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return ranks // local if local < ranks and ranks % local == 0 else ranks
