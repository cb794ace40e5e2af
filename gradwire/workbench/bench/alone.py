"""What a method costs a rank when nothing travels: the constants of the planner's check."""

import itertools
import statistics
from functools import partial

import torch.distributed as dist

from gradwire.integrate.attached import Attached
from gradwire.ranks.echo import EchoGroup
from gradwire.stages import STAGES
from gradwire.workbench.bench.contender import Contender, Task
from gradwire.workbench.bench.job import Job
from gradwire.workbench.bench.laps import laps
from gradwire.workbench.train.place import Place

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
        wire.open(wire.slots, wire.device, EchoGroup(place.world, task.device.type == "cuda"))
        wire.clock.every = 1
    medians = []
    for contender in (noop, other):
        for _ in range(WARM):
            contender.step(task)
        medians.append(statistics.median(laps(partial(contender.step, task), TIMED, task.device)))
    added = {STEP: max(0.0, medians[1] - medians[0])}
    if wire is None:
        return added
    found = _stages(other, wire, task)
    wire.close()
    return found | added


def _stages(contender: Contender, wire: Attached, task: Task) -> dict[str, float]:
    """Median seconds of each stage."""
    seen = [wire.clock.seconds()]
    for _ in range(TIMED):
        contender.step(task)
        seen.append(wire.clock.seconds())
    pairs = list(itertools.pairwise(seen))
    return {
        name: statistics.median(b[name] - a[name] for a, b in pairs)
        for name in STAGES
        if name != "exchange"
    }
