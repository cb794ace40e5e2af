"""Real training steps, one contender after the other, round by round."""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from gradwire.errors import ConfigError
from gradwire.plan.measure import measure_link
from gradwire.ranks.group import DistributedGroup
from gradwire.workbench.bench.alone import alone
from gradwire.workbench.bench.contender import Contender, Task
from gradwire.workbench.bench.job import Job
from gradwire.workbench.bench.laps import bytes_left, laps
from gradwire.workbench.bench.patience import Patience
from gradwire.workbench.bench.step_row import StepRow, Turn, known, row_of
from gradwire.workbench.lab.lab import LINK
from gradwire.workbench.train.place import Place

ROUND = 10
"""Timed steps of one contender before the next has its turn."""
WARM = 4
"""Steps before the first round: DDP orders its buckets anew, PowerSGD begins, kernels compile."""
GETTING_READY = 0.5
"""The share of a time limit after which no contender is made ready any more."""


def measure_steps(
    place: Place, job: Job, patience: Patience, sharing: int = 0
) -> list[dict[str, Any]]:
    """Every rank's work: the rows, the same on each of them (collective).

    sharing: how many ranks are on a GPU, 0 on CPU.
    """
    _check_gpu(job, place, sharing)
    place.barrier()  # nobody takes memory before all have looked
    task = Task(job, place.device, place.rank, sharing > 1, patience.heard)
    turns, failed = [], {}
    for name in job.methods:
        try:
            turns.append(Turn(Contender.of(name, job, task)))
        except (TypeError, ConfigError) as error:
            # Every rank is refused alike: PyTorch's bf16 hook wants NCCL, say.
            failed[name] = str(error)
    job = _measure(turns, job, task, place, patience)
    rows = {}
    for turn in turns:
        if turn.times:
            rows[turn.contender.name] = row_of(turn, turns[0], job, task, place)
        else:
            failed[turn.contender.name] = f"at_most={job.at_most:g} s were over"
    if job.trace:
        from gradwire.workbench.bench.trace import trace_steps

        trace_steps([turn.contender for turn in turns if turn.times], task, place, job)
    for turn in turns:
        if turn.contender.wire is not None:
            turn.contender.wire.close()
    for name, why in failed.items():
        rows[name] = StepRow(**known(name, job, task, place), why=why)
    return [rows[name].asdict() for name in job.methods]


def _measure(turns: Sequence[Turn], job: Job, task: Task, place: Place, patience: Patience) -> Job:
    """Steps of every contender; the job with the latency between ranks."""
    limit = Limit(job.at_most, place)
    for number, turn in enumerate(turns, start=1):
        if not limit.over(GETTING_READY):
            _tell(place, f"{turn.contender.name}: getting ready, {number} of {len(turns)}")
            with patience.during(f"a step of {turn.contender.name}, getting ready,"):
                _warm(turn, task, place)
    ready = [turn for turn in turns if turn.pace]
    job = replace(job, latency=_latency(place))
    for turn in ready:
        if job.alone and not limit.over(GETTING_READY):
            turn.alone = alone(turn.contender, job, task, place)
    rounds = list(_rounds(job.iterations))
    for number, count in enumerate(rounds, start=1):
        _tell(place, f"round {number} of {len(rounds)}")
        for turn in ready:
            if turn is turns[0] or not limit.over():
                with patience.during(f"a step of {turn.contender.name} in round {number}"):
                    _round(turn, task, place, _affordable(turn, count, job.seconds))
    return job


def _tell(place: Place, text: str) -> None:
    """How far it is, for people; and where it was, if it never ends."""
    if place.rank == 0:
        print(text, file=sys.stderr, flush=True)


class Limit:
    """So many seconds from now on; 0 is no limit."""

    def __init__(self, seconds: float, place: Place) -> None:
        self._seconds, self._place, self._begin = seconds, place, time.monotonic()

    def over(self, share: float = 1.0) -> bool:
        """Whether that share of them is gone: the same answer on every rank (collective)."""
        if not self._seconds:
            return False
        spent = self._place.sum(time.monotonic() - self._begin)[0] / self._place.world
        return spent > share * self._seconds


def _latency(place: Place) -> float:
    """Seconds until a small message is at the next rank."""
    assert dist.group.WORLD is not None
    group = DistributedGroup(dist.group.WORLD, place.device)
    _, latency = measure_link(group.all_gather, place.world, place.device)
    return float(place.share(latency))


def _check_gpu(job: Job, place: Place, sharing: int) -> None:
    """Refuses more ranks than fit on the GPUs, before one of them runs out in the middle."""
    if not sharing:
        return
    free, _ = torch.cuda.mem_get_info(place.device)
    if sharing * job.memory > free:
        raise ConfigError(
            f"ranks={place.world} with {len(job.methods)} methods need "
            f"{sharing * job.memory / 2**30:.1f} GiB a GPU, {free / 2**30:.1f} GiB are free. Use "
            f"fewer ranks or methods."
        )


def _rounds(iterations: int) -> Iterator[int]:
    while iterations > 0:
        yield min(ROUND, iterations)
        iterations -= ROUND


def _affordable(turn: Turn, count: int, seconds: float) -> int:
    """How many of `count` steps fit into what is left of `seconds`; one in any case at first."""
    if not seconds:
        return count
    fitting = int((seconds - sum(turn.times)) / turn.pace)
    return min(count, max(fitting, 0 if turn.times else 1))


def _warm(turn: Turn, task: Task, place: Place) -> None:
    for _ in range(WARM - 2):
        turn.contender.step(task)
    mine = laps(lambda: turn.contender.step(task), 1, task.device)
    turn.pace = place.sum(*mine)[0] / place.world
    if turn.contender.wire is not None:
        turn.before = turn.contender.wire.stats()
        turn.counted = turn.contender.wire.clock.counted


def _round(turn: Turn, task: Task, place: Place, count: int) -> None:
    """`count` timed steps; every rank notes the mean over all."""
    if not count:
        return
    place.barrier()
    before = bytes_left(LINK)
    mine = laps(lambda: turn.contender.step(task), count, place.device)
    turn.sent += bytes_left(LINK) - before
    turn.steps += count + 1
    turn.times += [total / place.world for total in place.sum(*mine)]
