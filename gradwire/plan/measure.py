"""Measurements for the planner: this device's memory, and the links between the ranks."""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gradwire.plan.machine import MACHINES, Machine

_ENTRIES = 4_000_000
"""The entries of the vectors that measure a CPU's memory; a GPU gets five times as many."""
_REPEAT, _MANY = 7, 60
"""The repetitions of a probe: the usual number, and the most."""
_SMALL, LARGE = 8, 1 << 20
"""The bytes that a rank puts into a probe: small for the latency, large for the rate."""
_LONGEST = 0.5
"""The most seconds that a probe should take; on a slow link a smaller probe is taken."""


def measure_machine(device: torch.device | None = None) -> Machine:
    """Return this device, with the measured bandwidth of `e.add_(g)`.

    The FLOP/s come from the table, if the device is in it.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = MACHINES["cpu"]
    name = "this cpu"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        key = name.lower().replace(" ", "").replace("-", "")
        matches = [m for table_name, m in MACHINES.items() if table_name.replace("-", "") in key]
        known = max(matches, key=lambda m: len(m.name)) if matches else MACHINES["v100"]
    # Larger than a GPU's cache, but small enough for a GPU whose memory is nearly full.
    size = _ENTRIES if device.type == "cpu" else 5 * _ENTRIES
    gradient = torch.ones(size, dtype=torch.float32, device=device)
    residual = torch.zeros_like(gradient)
    seconds = _median(lambda: residual.add_(gradient), device)
    return replace(known, name=name, bandwidth=12 * size / seconds)


_Gather = Callable[[Tensor], Tensor]


def measure_link(gather: _Gather, ranks: int, device: torch.device) -> tuple[float, float]:
    """Return payload bytes per second and seconds of latency between `ranks`, by all-gathers.

    seconds = (P - 1) latency + (P - 1) bytes / rate. This is a collective call. Ranks measure
    different numbers, so take one rank's numbers for all.
    """
    if ranks == 1:
        return 1e15, 0.0

    def repeats_within_limit(seconds: float) -> int:
        """Return how often the probe fits, by the slowest rank.

        All ranks must agree, because a gather that only some ranks call never ends.
        """
        slowest = float(gather(torch.tensor([seconds], dtype=torch.float32, device=device)).max())
        return int(_LONGEST / max(slowest, 1e-9))

    small = _time_gather(gather, _SMALL, device)
    # Short probes vary most, so they are repeated more often.
    small = _time_gather(
        gather, _SMALL, device, max(_REPEAT, min(_MANY, repeats_within_limit(small)))
    )
    probe = _time_gather(gather, LARGE // 16, device)
    large, size = probe, LARGE // 16
    if repeats_within_limit(probe) >= 16:
        large, size = _time_gather(gather, LARGE, device), LARGE
    transfer = max(1e-9, large - small)
    return (ranks - 1) * (size - _SMALL) / transfer, small / (ranks - 1)


def _time_gather(gather: _Gather, size: int, device: torch.device, repeat: int = _REPEAT) -> float:
    """Return the median seconds of a gather of `size` bytes per rank."""
    payload = torch.zeros(size, dtype=torch.uint8, device=device)
    return _median(lambda: gather(payload), device, repeat)


def _median(call: Callable[[], object], device: torch.device, repeat: int = _REPEAT) -> float:
    """Return the median seconds of a call; the first two calls are left out."""
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
    """Return the nodes, as torchrun describes them.

    Ranks of one machine count as nodes, because the link between them was measured.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return ranks // local if local < ranks and ranks % local == 0 else ranks
