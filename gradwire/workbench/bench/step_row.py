"""A method's row of `bench step`: what was seen of its steps."""

import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from gradwire.accumulate.layout import bundle_bytes
from gradwire.state.stats import Stats
from gradwire.workbench.bench.contender import Contender, Task
from gradwire.workbench.bench.job import Job
from gradwire.workbench.bench.laps import quantiles
from gradwire.workbench.bench.row import device_name, versions
from gradwire.workbench.train.place import Place


@dataclass(frozen=True)
class StepRow:
    """A method's training step.

    link: bits a second, asked and measured; None on a network that is not the lab's; and
    seconds of latency between ranks. bundle_bytes:
    what is compressed and exchanged as one, at most; bundles: how many there are. seconds: p20,
    median, p80 of a step, the mean over the ranks. efficiency: noop_seconds over the median.
    bytes: what leaves a rank in a step, counted, or by formula for PyTorch's own; wire_bytes:
    the same by the interface, headers included, where each rank has one of its own. stages:
    seconds of each, in a step. exposed: what the method adds to a step of noop; hidden: the
    stages' seconds that it does not. alone: seconds of each stage, in a step, when nothing travels.
    why: what kept it from running.
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
class Turn:
    """A contender and what was seen of it."""

    contender: Contender
    times: list[float] = field(default_factory=list)
    steps: int = 0
    sent: int = 0
    before: Stats | None = None
    counted: int = 0
    alone: dict[str, float] = field(default_factory=dict)
    pace: float = 0.0
    """Seconds of the last step before the first round."""


def row_of(turn: Turn, noop: Turn, job: Job, task: Task, place: Place) -> StepRow:
    """The row of a method whose steps were timed."""
    contender = turn.contender
    said = known(contender.name, job, task, place)
    seconds, base = quantiles(turn.times), quantiles(noop.times)["median"]
    exposed = seconds["median"] - base
    sent = contender.bytes_of(task.entries, place.world)
    stages: dict[str, float] = {}
    if contender.wire is not None and turn.before is not None:
        now, before = contender.wire.stats(), turn.before
        steps = now.steps - before.steps
        sent = (now.bytes_sent - before.bytes_sent) // steps
        if timed := contender.wire.clock.counted - turn.counted:
            stages = {k: (now.seconds[k] - v) / timed for k, v in before.seconds.items()}
        said["bundles"] = now.bundles
    return StepRow(
        **said,
        iterations=len(turn.times),
        seconds=seconds,
        noop_seconds=base,
        efficiency=round(base / seconds["median"], 4),
        bytes=sent,
        wire_bytes=turn.sent // turn.steps if job.link else None,
        stages={k: round(v, 7) for k, v in stages.items()},
        exposed=round(exposed, 7),
        hidden=round(sum(stages.values()) - exposed, 7) if stages else None,
        alone=turn.alone,
    )


def known(name: str, job: Job, task: Task, place: Place) -> dict[str, Any]:
    """What a row says before anything is measured."""
    config = job.config(name)
    entries = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    width = {"bf16": "bf16"}.get(name, "fp32")
    cores = os.cpu_count() or 1
    with suppress(AttributeError):
        cores = len(os.sched_getaffinity(0))
    return {
        "model": job.model,
        "ranks": place.world,
        "method": name,
        "exchange": config.exchange if config else "",
        "values": config.values if config else width,
        "indices": config.encoding.indices if config else "",
        "density": config.density if config else None,
        "bundle_bytes": int(bundle_bytes(config.bundle_mb, place.device, entries))
        if config
        else None,
        "bundles": None,
        "batch": job.batch,
        "dtype": job.autocast,
        "device": device_name(place.device),
        "versions": versions(place.device),
        "cores": cores,
        "link": {
            "asked": job.rate or None,
            "measured": job.measured or None,
            "latency": job.latency,
        },
    }
