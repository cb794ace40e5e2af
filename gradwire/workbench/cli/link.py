"""How fast the ranks can talk to each other."""

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradwire.workbench.train.worker import Worker

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


def measure(worker: Worker) -> Link:
    """All-gathers of a few sizes; the same numbers on every rank (collective)."""
    total = torch.ones(1, dtype=torch.float32, device=worker.device)
    dist.all_reduce(total)
    if int(total) != worker.world:
        raise RuntimeError(f"all_reduce over {worker.world} ranks gave {int(total)}")
    rows = []
    for size in SIZES:
        seconds = worker.share(_time(size, worker))
        received = size * (worker.world - 1)
        rows.append(Row(size, seconds, received / seconds))
    return Link(worker.world, dist.get_backend(), tuple(rows))


def _time(size: int, worker: Worker) -> float:
    """Median seconds of one all-gather, the first round left out."""
    mine = torch.zeros(size, dtype=torch.uint8, device=worker.device)
    everyone = mine.new_empty(size * worker.world)
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    times = []
    for _ in range(ROUNDS + 1):
        worker.barrier()
        begin = time.perf_counter()
        gather(everyone, mine)
        if worker.device.type == "cuda":
            torch.cuda.synchronize(worker.device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])
