"""The time a method costs one rank when nothing travels, for the planner's check.

Each rank trains in a group of its own. The hook, threads, copies and kernels are the real ones.
"""

import itertools
import statistics
from functools import partial

import torch.distributed as dist

from gradwire.ranks.echo import EchoGroup
from gradwire.stages import STAGES
from gradwire.state.state import State
from gradwire.workbench.bench.contender import Contender
from gradwire.workbench.bench.job import Job
from gradwire.workbench.bench.laps import lap_seconds
from gradwire.workbench.bench.task import Task
from gradwire.workbench.train.worker import Worker

WARM_UP_STEPS, TIMED_STEPS = 3, 7
"""Numbers of steps. Three to warm up, because PowerSGD begins to compress with its third step."""
STEP = "step"
"""The key of the seconds that a method adds to a step of noop, which sends nothing."""


def time_alone(contender: Contender, job: Job, task: Task, worker: Worker) -> dict[str, float]:
    """Return the seconds per step of each stage, and the seconds added to a step of noop.

    The values are means over all ranks, which measure at the same time (collective). For a method
    of gradwire, mirror images of this rank take the place of the other ranks.
    """
    if contender.name in ("noop", "barrier"):
        return {}
    worker.barrier()
    seconds = _time_this_rank(contender.name, job, task, worker)
    sums = worker.sum(*seconds.values())
    return {name: round(total / worker.world, 7) for name, total in zip(seconds, sums, strict=True)}


def _time_this_rank(name: str, job: Job, task: Task, worker: Worker) -> dict[str, float]:
    """Return the seconds of each stage, and those added to a step of noop, on this rank."""
    group = dist.new_group([worker.rank], use_local_synchronization=True)
    noop, measured = (Contender.build(n, job, task, group) for n in ("noop", name))
    wire = measured.wire
    if wire is not None:
        wire.open(wire.slots, wire.device, EchoGroup(worker.world, task.device.type == "cuda"))
        wire.clock.every = 1
    medians = []
    for contender in (noop, measured):
        for _ in range(WARM_UP_STEPS):
            contender.step(task)
        seconds = lap_seconds(partial(contender.step, task), TIMED_STEPS, task.device)
        medians.append(statistics.median(seconds))
    added = {STEP: max(0.0, medians[1] - medians[0])}
    if wire is None:
        return added
    stages = _stage_seconds(measured, wire, task)
    wire.close()
    return stages | added


def _stage_seconds(contender: Contender, wire: State, task: Task) -> dict[str, float]:
    """Return the median seconds of each stage; no exchange, because nothing travels."""
    totals = [wire.clock.seconds()]
    for _ in range(TIMED_STEPS):
        contender.step(task)
        totals.append(wire.clock.seconds())
    pairs = list(itertools.pairwise(totals))
    return {
        name: statistics.median(after[name] - before[name] for before, after in pairs)
        for name in STAGES
        if name != "exchange"
    }
