"""The row of a method in `bench step`, and the measurements that it is made from."""

import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from gradwire.accumulate.layout import bundle_bytes
from gradwire.integrate.local_steps.handle import LocalSteps
from gradwire.state.stats import Stats
from gradwire.workbench.bench.contender import Contender
from gradwire.workbench.bench.job import Job
from gradwire.workbench.bench.laps import time_quantiles
from gradwire.workbench.bench.local import rounds_between
from gradwire.workbench.bench.row import device_name, software_versions
from gradwire.workbench.bench.task import Task
from gradwire.workbench.train.worker import Worker


@dataclass(frozen=True)
class StepRow:
    """A method's training step.

    link: bits per second, asked and measured, None outside of the lab; and the seconds of latency
    between ranks. bundle_bytes: the largest size of a bundle. bundles: the number of bundles.
    seconds: p20, median and p80 of a step, as means over the ranks. efficiency: noop_seconds / the
    median. bytes: the bytes that leave a rank per step, counted, or by formula for PyTorch's
    methods. wire_bytes: the same counted by the interface, headers included; only in the lab,
    where each rank has an interface. stages: the seconds of each stage per step. exposed: the
    seconds that the method adds to a step of noop. hidden: the sum of the stages - exposed.
    alone: the seconds of each stage per step when nothing travels. why: the reason not to run.
    optimizer: the optimiser of the step. tokens_per_second: of all ranks; None without text.

    Of local steps seconds are those of the mean step of a round, and `never` takes the place of
    noop in efficiency and exposed. every: the steps of a round. bits_per_round: the bits that leave
    a rank in a round. never_seconds: the median of `never`. bound_seconds: the larger of it, and of
    the time that bits_per_round take on the measured link, divided by every; None without a link.
    of_bound: the median / bound_seconds.
    islands: the number of islands, 0 for none.
    """

    model: str
    ranks: int
    method: str
    exchange: str
    values: str
    indices: str
    density: float | None
    bundle_bytes: int | None
    bundles: int | None
    batch: int
    dtype: str
    device: str
    versions: str
    cores: int
    link: dict[str, float | None]
    iterations: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    noop_seconds: float | None = None
    efficiency: float | None = None
    bytes: int | None = None
    wire_bytes: int | None = None
    stages: dict[str, float] = field(default_factory=dict)
    exposed: float | None = None
    hidden: float | None = None
    alone: dict[str, float] = field(default_factory=dict)
    why: str = ""
    optimizer: str = "sgd"
    islands: int = 0
    tokens_per_second: float | None = None
    every: int = 1
    bits_per_round: int | None = None
    never_seconds: float | None = None
    bound_seconds: float | None = None
    of_bound: float | None = None

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Series:
    """A contender and the measurements of its steps so far.

    period: the steps of a round, 1 without local steps. times: the mean step of each timed round.
    steps: the steps that interface_bytes counts; of local steps those of whole rounds.
    stats_before, timed_before and inner_before: gradwire's statistics, the exchanges that its clock
    had timed, and the inner steps of local steps, before the first turn.
    """

    contender: Contender
    period: int = 1
    times: list[float] = field(default_factory=list)
    steps: float = 0
    interface_bytes: int = 0
    stats_before: Stats | None = None
    timed_before: int = 0
    inner_before: int = 0
    alone: dict[str, float] = field(default_factory=dict)
    pace: float = 0.0
    """Seconds of a step before the first turn."""


def measured_row(
    series: Series, noop: Series, base: Series, job: Job, task: Task, worker: Worker
) -> StepRow:
    """Return the row of a method whose steps were timed.

    base: the method that it is compared with, noop or never.
    """
    contender = series.contender
    settings = row_settings(contender.name, job, task, worker)
    seconds = time_quantiles(series.times)
    compared = time_quantiles(base.times)["median"]
    exposed = seconds["median"] - compared
    sent = contender.bytes_of(task.entries, worker.world)
    stages: dict[str, float] = {}
    if contender.wire is not None and series.stats_before is not None:
        now, before = contender.wire.stats(), series.stats_before
        exchanged, per_step = now.bytes_sent - before.bytes_sent, 1.0
        if isinstance(contender.wire, LocalSteps):
            local = contender.wire
            rounds = rounds_between(local, series.inner_before, local.inner_steps)
            in_round = exchanged / rounds
            sent, per_step = round(in_round / local.every), local.fragments / local.every
            settings |= _bound(round(8 * in_round), local.every, compared, seconds["median"], job)
        else:
            sent = exchanged // (now.steps - before.steps)
        if timed := contender.wire.clock.counted - series.timed_before:
            stages = {k: (now.seconds[k] - v) * per_step / timed for k, v in before.seconds.items()}
        settings["bundles"] = now.bundles
    if task.tokens:
        settings["tokens_per_second"] = round(worker.world * task.tokens / seconds["median"], 1)
    return StepRow(
        **settings,
        iterations=len(series.times) * series.period,
        seconds=seconds,
        noop_seconds=time_quantiles(noop.times)["median"],
        efficiency=round(compared / seconds["median"], 4),
        bytes=sent,
        wire_bytes=round(series.interface_bytes / series.steps) if job.link else None,
        stages={k: round(v, 7) for k, v in stages.items()},
        exposed=round(exposed, 7),
        hidden=round(sum(stages.values()) - exposed, 7) if stages else None,
        alone=series.alone,
    )


def _bound(bits: int, every: int, never: float, median: float, job: Job) -> dict[str, Any]:
    """Return the fields of local steps: bits of a round, and the least time of a step."""
    out: dict[str, Any] = {"every": every, "bits_per_round": bits, "never_seconds": never}
    if job.measured:
        bound = max(never, bits / job.measured / every)
        out |= {"bound_seconds": round(bound, 7), "of_bound": round(median / bound, 4)}
    return out


def row_settings(name: str, job: Job, task: Task, worker: Worker) -> dict[str, Any]:
    """Return the fields of a row that are known before anything is measured."""
    config = job.config(name)
    entries = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    width = {"bf16": "bf16"}.get(name, "fp32")
    cores = os.cpu_count() or 1
    with suppress(AttributeError):
        cores = len(os.sched_getaffinity(0))
    return {
        "model": job.model,
        "ranks": worker.world,
        "method": name,
        "exchange": config.exchange if config else "",
        "values": config.values if config else width,
        "indices": config.encoding.indices if config else "",
        "density": config.density if config else None,
        "bundle_bytes": int(bundle_bytes(config.bundle_mb, worker.device, entries))
        if config
        else None,
        "bundles": None,
        "batch": job.batch,
        "dtype": job.autocast,
        "device": device_name(worker.device),
        "versions": software_versions(worker.device),
        "cores": cores,
        "link": {
            "asked": job.rate or None,
            "measured": job.measured or None,
            "latency": job.latency,
        },
        "optimizer": "muon" if job.is_local(name) else job.optimizer,
        "islands": job.islands,
    }
