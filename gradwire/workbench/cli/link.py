"""Measure the links between ranks, for `gradwire doctor` and `gradwire plan --measure`."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gradwire.plan.measure import measure_link, node_count
from gradwire.plan.network import GOODPUT
from gradwire.ranks.distributed import DistributedGroup
from gradwire.workbench.train.worker import Worker

_SIZES = (4, 4_096, 262_144, 4_194_304, 33_554_432)
_ROUNDS = 7


@dataclass(frozen=True)
class LinkRow:
    """An all-gather of `size` bytes per rank.

    seconds: the median. bandwidth: bytes per second into each rank.
    """

    size: int
    seconds: float
    bandwidth: float


@dataclass(frozen=True)
class Link:
    """Measurements between `world` ranks over a backend."""

    world: int
    backend: str
    rows: tuple[LinkRow, ...]


def measure_all_gathers(worker: Worker) -> Link:
    """Measure all-gathers of a few sizes; return the same numbers on every rank (collective)."""
    total = torch.ones(1, dtype=torch.float32, device=worker.device)
    dist.all_reduce(total)
    if int(total) != worker.world:
        raise RuntimeError(f"all_reduce over {worker.world} ranks gave {int(total)}")
    rows = []
    for size in _SIZES:
        seconds = worker.share(_time_all_gather(size, worker))
        received = size * (worker.world - 1)
        rows.append(LinkRow(size, seconds, received / seconds))
    return Link(worker.world, dist.get_backend(), tuple(rows))


def _time_all_gather(size: int, worker: Worker) -> float:
    """Return the median seconds of one all-gather, without the first round."""
    sent = torch.zeros(size, dtype=torch.uint8, device=worker.device)
    received = sent.new_empty(size * worker.world)
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    times = []
    for _ in range(_ROUNDS + 1):
        worker.barrier()
        begin = time.perf_counter()
        gather(received, sent)
        if worker.device.type == "cuda":
            torch.cuda.synchronize(worker.device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def measure_cluster(worker: Worker) -> dict[str, Any]:
    """Measure link, latency, ranks and nodes of the running ranks (collective)."""
    assert dist.group.WORLD is not None
    group = DistributedGroup(dist.group.WORLD, worker.device)
    rate, latency = worker.share(measure_link(group.all_gather, worker.world, worker.device))
    return {
        "rank": worker.rank,
        "ranks": worker.world,
        "nodes": node_count(worker.world),
        "link": 8 * rate / GOODPUT,
        "latency": latency,
    }
