"""The row of a method in `bench step`, and the measurements that it is made from."""

import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from gradwire.accumulate.layout import bundle_bytes
from gradwire.state.stats import Stats
from gradwire.workbench.bench.contender import Contender, Task
from gradwire.workbench.bench.job import Job
from gradwire.workbench.bench.laps import time_quantiles
from gradwire.workbench.bench.row import device_name, software_versions
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

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Series:
    """A contender and the measurements of its steps so far.

    times: the seconds of each timed step. steps: the steps that interface_bytes counts.
    stats_before and timed_before: gradwire's statistics, and the steps that its clock had timed,
    before the first round.
    """

    contender: Contender
    times: list[float] = field(default_factory=list)
    steps: int = 0
    interface_bytes: int = 0
    stats_before: Stats | None = None
    timed_before: int = 0
    alone: dict[str, float] = field(default_factory=dict)
    pace: float = 0.0
    """Seconds of the last step before the first round."""


def measured_row(series: Series, noop: Series, job: Job, task: Task, worker: Worker) -> StepRow:
    """Return the row of a method whose steps were timed."""
    contender = series.contender
    settings = row_settings(contender.name, job, task, worker)
    seconds, base = time_quantiles(series.times), time_quantiles(noop.times)["median"]
    exposed = seconds["median"] - base
    sent = contender.bytes_of(task.entries, worker.world)
    stages: dict[str, float] = {}
    if contender.wire is not None and series.stats_before is not None:
        now, before = contender.wire.stats(), series.stats_before
        steps = now.steps - before.steps
        sent = (now.bytes_sent - before.bytes_sent) // steps
        if timed := contender.wire.clock.counted - series.timed_before:
            stages = {k: (now.seconds[k] - v) / timed for k, v in before.seconds.items()}
        settings["bundles"] = now.bundles
    return StepRow(
        **settings,
        iterations=len(series.times),
        seconds=seconds,
        noop_seconds=base,
        efficiency=round(base / seconds["median"], 4),
        bytes=sent,
        wire_bytes=series.interface_bytes // series.steps if job.link else None,
        stages={k: round(v, 7) for k, v in stages.items()},
        exposed=round(exposed, 7),
        hidden=round(sum(stages.values()) - exposed, 7) if stages else None,
        alone=series.alone,
    )


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
    }
