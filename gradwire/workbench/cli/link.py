"""How fast the ranks can talk to each other."""

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradwire.workbench.train.place import Place

SIZES = (4, 4_096, 262_144, 4_194_304, 33_554_432)
ROUNDS = 7


@dataclass(frozen=True)
class Row:
    """An all-gather of `size` bytes a rank: median seconds, and bytes a second into each rank."""

    size: int
    seconds: float
    bandwidth: float


@dataclass(frozen=True)
class Link:
    """What was measured, and between how many ranks over what."""

    world: int
    backend: str
    rows: tuple[Row, ...]


def measure(place: Place) -> Link:
    """All-gathers of a few sizes; the same numbers on every rank (collective)."""
    total = torch.ones(1, dtype=torch.float32, device=place.device)
    dist.all_reduce(total)
    if int(total) != place.world:
        raise RuntimeError(f"all_reduce over {place.world} ranks gave {int(total)}")
    rows = []
    for size in SIZES:
        seconds = place.share(_time(size, place))
        received = size * (place.world - 1)
        rows.append(Row(size, seconds, received / seconds))
    return Link(place.world, dist.get_backend(), tuple(rows))


def _time(size: int, place: Place) -> float:
    """Median seconds of one all-gather, the first round left out."""
    mine = torch.zeros(size, dtype=torch.uint8, device=place.device)
    everyone = mine.new_empty(size * place.world)
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    times = []
    for _ in range(ROUNDS + 1):
        place.barrier()
        begin = time.perf_counter()
        gather(everyone, mine)
        if place.device.type == "cuda":
            torch.cuda.synchronize(place.device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])
