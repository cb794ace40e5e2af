"""What a method costs a rank when nothing travels: the constants of the planner's check."""

import statistics
from functools import partial

import torch.distributed as dist

from gradwire.bench.contender import Contender, Task
from gradwire.bench.job import Job
from gradwire.bench.laps import laps
from gradwire.cluster.mirror import Mirror
from gradwire.train.place import Place

WARM, TIMED = 3, 7
"""Steps; PowerSGD begins with its third."""
STEP = "step"
"""All that the method adds to a step of noop."""


def alone(contender: Contender, job: Job, task: Task, place: Place) -> dict[str, float]:
    """Seconds a step of each stage, and what all of them add to a step of noop.

    A DDP of this rank alone, and for our own methods mirrors of it in the place of other ranks: the
    hook, threads, copies and kernels are the real ones. The mean over the ranks, which do the same
    at the same time.
    """
    if contender.name in ("noop", "barrier"):
        return {}
    place.barrier()
    mine = _alone(contender.name, job, task, place)
    sums = place.sum(*mine.values())
    return {k: round(v / place.world, 7) for k, v in zip(mine, sums, strict=True)}


def _alone(name: str, job: Job, task: Task, place: Place) -> dict[str, float]:
    group = dist.new_group([place.rank], use_local_synchronization=True)
    noop, other = (Contender.of(n, job, task, group) for n in ("noop", name))
    wire = other.wire
    if wire is not None:
        wire.open(wire.slots, wire.device, Mirror(place.world, task.device.type == "cuda"))
    medians, spent = [], {}
    for contender in (noop, other):
        for _ in range(WARM):
            contender.step(task)
        before = {} if wire is None else wire.clock.seconds()
        times = laps(partial(contender.step, task), TIMED, task.device)
        medians.append(statistics.median(times))
        if wire is not None:
            spent = {k: (v - before[k]) / (TIMED + 1) for k, v in wire.clock.seconds().items()}
            spent.pop("exchange")
    if wire is not None:
        wire.close()
    return spent | {STEP: max(0.0, medians[1] - medians[0])}
