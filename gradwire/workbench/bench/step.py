"""Real training steps of every contender, in rounds of a few steps each.

Rounds spread each contender's steps over the whole run, so that a busy moment of the machine
does not hit one contender only.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from gradwire.errors import ConfigError
from gradwire.plan.measure import measure_link
from gradwire.ranks.distributed import DistributedGroup
from gradwire.workbench.bench.alone import time_alone
from gradwire.workbench.bench.contender import Contender, Task
from gradwire.workbench.bench.job import Job
from gradwire.workbench.bench.laps import interface_bytes_sent, lap_seconds
from gradwire.workbench.bench.step_row import Series, StepRow, measured_row, row_settings
from gradwire.workbench.bench.watchdog import Watchdog
from gradwire.workbench.lab.lab import LINK
from gradwire.workbench.train.worker import Worker

ROUND = 10
"""Timed steps of one contender in a round."""
WARM = 4
"""Steps before the first round: DDP reorders its buckets, PowerSGD begins, kernels compile."""
GETTING_READY = 0.5
"""The share of the time limit after which no further contender is made ready."""


def measure_steps(
    worker: Worker, job: Job, watchdog: Watchdog, sharing: int = 0
) -> list[dict[str, Any]]:
    """Measure all methods of the job, and return their rows, equal on every rank (collective).

    sharing: the number of ranks per GPU, 0 on CPU.
    """
    _check_gpu(job, worker, sharing)
    worker.barrier()  # no rank takes memory before every rank has checked
    task = Task(job, worker.device, worker.rank, sharing > 1, watchdog.note_progress)
    all_series, failed = [], {}
    for name in job.methods:
        try:
            all_series.append(Series(Contender.build(name, job, task)))
        except (TypeError, ConfigError) as error:
            # The same on every rank. For example, PyTorch's bf16 hook needs NCCL.
            failed[name] = str(error)
    job = _measure_contenders(all_series, job, task, worker, watchdog)
    rows = {}
    for series in all_series:
        if series.times:
            rows[series.contender.name] = measured_row(series, all_series[0], job, task, worker)
        else:
            failed[series.contender.name] = f"at_most={job.at_most:g} s were over"
    if job.trace:
        from gradwire.workbench.bench.trace import trace_steps

        trace_steps([series.contender for series in all_series if series.times], task, worker, job)
    for series in all_series:
        if series.contender.wire is not None:
            series.contender.wire.close()
    for name, why in failed.items():
        rows[name] = StepRow(**row_settings(name, job, task, worker), why=why)
    return [rows[name].asdict() for name in job.methods]


def _measure_contenders(
    all_series: Sequence[Series], job: Job, task: Task, worker: Worker, watchdog: Watchdog
) -> Job:
    """Warm up and time every contender; return the job with the measured latency."""
    limit = _TimeLimit(job.at_most, worker)
    for number, series in enumerate(all_series, start=1):
        if not limit.over(GETTING_READY):
            name = series.contender.name
            _report_progress(worker, f"{name}: getting ready, {number} of {len(all_series)}")
            with watchdog.during(f"a step of {name}, getting ready,"):
                _warm_up(series, task, worker)
    ready = [series for series in all_series if series.pace]
    job = replace(job, latency=_latency(worker))
    for series in ready:
        if job.alone and not limit.over(GETTING_READY):
            series.alone = time_alone(series.contender, job, task, worker)
    rounds = list(_round_sizes(job.iterations))
    for number, count in enumerate(rounds, start=1):
        _report_progress(worker, f"round {number} of {len(rounds)}")
        for series in ready:
            # The first is noop, and all others are compared with it: it has every round.
            if series is all_series[0] or not limit.over():
                with watchdog.during(f"a step of {series.contender.name} in round {number}"):
                    _time_round(series, task, worker, _affordable_steps(series, count, job.seconds))
    return job


def _report_progress(worker: Worker, text: str) -> None:
    """Print the progress; if the run never ends, the last line tells where it hangs."""
    if worker.rank == 0:
        print(text, file=sys.stderr, flush=True)


class _TimeLimit:
    """A limit of `seconds` from now on, the same for all ranks; 0 is no limit."""

    def __init__(self, seconds: float, worker: Worker) -> None:
        self._seconds, self._place, self._begin = seconds, worker, time.monotonic()

    def over(self, share: float = 1.0) -> bool:
        """Return True once that share of the limit is spent; equal on every rank (collective)."""
        if not self._seconds:
            return False
        # The mean over the ranks, because their clocks differ and their answers must not.
        spent = self._place.sum(time.monotonic() - self._begin)[0] / self._place.world
        return spent > share * self._seconds


def _latency(worker: Worker) -> float:
    """Measure the seconds until a small message is at the next rank (collective)."""
    assert dist.group.WORLD is not None
    group = DistributedGroup(dist.group.WORLD, worker.device)
    _, latency = measure_link(group.all_gather, worker.world, worker.device)
    return float(worker.share(latency))


def _check_gpu(job: Job, worker: Worker, sharing: int) -> None:
    """Raise if the ranks of a GPU need more memory than is free."""
    if not sharing:
        return
    free, _ = torch.cuda.mem_get_info(worker.device)
    if sharing * job.memory > free:
        raise ConfigError(
            f"ranks={worker.world} with {len(job.methods)} methods need "
            f"{sharing * job.memory / 2**30:.1f} GiB a GPU, {free / 2**30:.1f} GiB are free. Use "
            f"fewer ranks or methods."
        )


def _round_sizes(iterations: int) -> Iterator[int]:
    """Yield the number of steps of each round."""
    while iterations > 0:
        yield min(ROUND, iterations)
        iterations -= ROUND


def _affordable_steps(series: Series, count: int, seconds: float) -> int:
    """Return the number of steps, `count` at most, that fit into the rest of `seconds`.

    At least one while no step has been timed, so that every contender has a row.
    """
    if not seconds:
        return count
    fitting = int((seconds - sum(series.times)) / series.pace)
    return min(count, max(fitting, 0 if series.times else 1))


def _warm_up(series: Series, task: Task, worker: Worker) -> None:
    """Take WARM steps, and note the pace of the last one and the statistics so far."""
    for _ in range(WARM - 2):
        series.contender.step(task)
    # lap_seconds takes two steps, and times the second.
    last = lap_seconds(lambda: series.contender.step(task), 1, task.device)
    series.pace = worker.sum(*last)[0] / worker.world
    if series.contender.wire is not None:
        series.stats_before = series.contender.wire.stats()
        series.timed_before = series.contender.wire.clock.counted


def _time_round(series: Series, task: Task, worker: Worker, count: int) -> None:
    """Time `count` steps; every rank notes the mean over all ranks."""
    if not count:
        return
    worker.barrier()
    before = interface_bytes_sent(LINK)
    seconds = lap_seconds(lambda: series.contender.step(task), count, worker.device)
    series.interface_bytes += interface_bytes_sent(LINK) - before
    series.steps += count + 1
    series.times += [total / worker.world for total in worker.sum(*seconds)]
