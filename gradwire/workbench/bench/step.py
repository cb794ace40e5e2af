"""Real training steps of every contender, in turns of a few steps each.

Turns spread each contender's steps over the whole run, so that a busy moment of the machine
does not hit one contender only.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from gradwire.errors import ConfigError
from gradwire.plan.measure import measure_link
from gradwire.ranks.distributed import DistributedGroup
from gradwire.workbench.bench.alone import time_alone
from gradwire.workbench.bench.contender import Contender
from gradwire.workbench.bench.job import NEVER, Job
from gradwire.workbench.bench.laps import interface_bytes_sent, lap_seconds, round_means
from gradwire.workbench.bench.local import LocalContender
from gradwire.workbench.bench.step_row import Series, StepRow, measured_row, row_settings
from gradwire.workbench.bench.task import Task
from gradwire.workbench.bench.watchdog import Watchdog
from gradwire.workbench.lab.lab import LINK
from gradwire.workbench.train.worker import Worker

TURN = 10
"""Timed steps of one contender in a turn."""
LEAST_ROUNDS = 3
"""The least number of timed rounds of a contender with local steps."""
WARM = 4
"""Steps before the first turn: DDP reorders its buckets, PowerSGD begins, kernels compile."""
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
            contender = (
                LocalContender.build_local(name, job, task)
                if job.is_local(name)
                else Contender.build(name, job, task)
            )
            all_series.append(Series(contender, period=contender.period))
        except (TypeError, ConfigError) as error:
            # The same on every rank. For example, PyTorch's bf16 hook needs NCCL.
            failed[name] = str(error)
    job = _measure_contenders(all_series, job, task, worker, watchdog)
    rows = {}
    bases = {series.contender.name: series for series in all_series}
    for name, series in bases.items():
        base = bases[NEVER if job.is_local(name) else "noop"]
        if series.times and base.times:
            rows[name] = measured_row(series, bases["noop"], base, job, task, worker)
        else:
            failed[name] = f"at_most={job.at_most:g} s were over"
    if job.trace:
        from gradwire.workbench.bench.trace import trace_steps

        # A step of local steps is not typical: most have no exchange.
        traced = [s.contender for s in all_series if s.times and not job.is_local(s.contender.name)]
        trace_steps(traced, task, worker, job)
    for series in all_series:
        series.contender.close()
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
        local = job.is_local(series.contender.name)
        if job.alone and not local and not limit.over(GETTING_READY):
            series.alone = time_alone(series.contender, job, task, worker)
    turns = -(-job.iterations // TURN)
    for turn in range(turns):
        _report_progress(worker, f"turn {turn + 1} of {turns}")
        for series in ready:
            # The first is noop, and all others are compared with it: it has every turn.
            if series is all_series[0] or not limit.over():
                count = _share_of_turn(series.period, job.iterations, turn, turns)
                with watchdog.during(f"a step of {series.contender.name} in turn {turn + 1}"):
                    _time_turn(series, task, worker, _affordable(series, count, job.seconds))
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


def _share_of_turn(period: int, iterations: int, turn: int, turns: int) -> int:
    """Return the rounds of `period` steps in turn `turn` of `turns`."""
    if period == 1:
        return min(TURN, iterations - turn * TURN)
    rounds = max(LEAST_ROUNDS, -(-iterations // period))
    return rounds * (turn + 1) // turns - rounds * turn // turns


def _affordable(series: Series, count: int, seconds: float) -> int:
    """Return the number of rounds, `count` at most, that fit into the rest of `seconds`.

    At least one while none has been timed, so that every contender has a row.
    """
    if not seconds or not count:
        return count
    fitting = int((seconds / series.period - sum(series.times)) / series.pace)
    return min(count, max(fitting, 0 if series.times else 1))


def _warm_up(series: Series, task: Task, worker: Worker) -> None:
    """Take WARM steps, or two rounds, and note the pace and the statistics so far."""
    contender, period = series.contender, series.period
    contender.begin_turn()
    lead = WARM - 1 if period == 1 else period + contender.lead
    last = lap_seconds(lambda: contender.step(task), period, task.device, lead)
    contender.end_turn()
    series.pace = worker.sum(sum(last) / period)[0] / worker.world
    if contender.wire is not None:
        series.stats_before = contender.wire.stats()
        series.timed_before = contender.wire.clock.counted
        series.inner_before = getattr(contender.wire, "inner_steps", 0)


def _time_turn(series: Series, task: Task, worker: Worker, count: int) -> None:
    """Time `count` rounds; every rank notes the mean over all ranks."""
    if not count:
        return
    contender, steps = series.contender, count * series.period
    contender.begin_turn()
    worker.barrier()
    before = interface_bytes_sent(LINK)
    seconds = lap_seconds(lambda: contender.step(task), steps, worker.device, contender.lead)
    contender.end_turn()
    series.interface_bytes += interface_bytes_sent(LINK) - before
    series.steps += contender.whole_steps(steps + contender.lead)
    means = round_means(seconds, series.period)
    series.times += [total / worker.world for total in worker.sum(*means)]
