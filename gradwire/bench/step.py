"""Real training steps, one contender after the other, round by round."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from gradwire.accumulate.layout import bundle_bytes
from gradwire.bench.alone import alone
from gradwire.bench.contender import Contender, Task
from gradwire.bench.job import Job
from gradwire.bench.laps import bytes_left, laps, quantiles
from gradwire.bench.row import device_name, versions
from gradwire.cluster.group import DistributedGroup
from gradwire.cluster.lab import LINK
from gradwire.errors import ConfigError
from gradwire.plan.measure import measure_link
from gradwire.stats import Stats
from gradwire.train.place import Place

ROUND = 10
"""Timed steps of one contender before the next has its turn."""
WARM = 4
"""Steps before the first round: DDP orders its buckets anew, PowerSGD begins, kernels compile."""


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
    alone: dict[str, float] = field(default_factory=dict)
    pace: float = 0.0
    """Seconds of the last step before the first round."""


def measure_steps(place: Place, job: Job) -> list[dict[str, Any]]:
    """Every rank's work: the rows, the same on each of them (collective)."""
    device = place.device
    _check_gpu(job, place)
    place.barrier()  # nobody takes memory before all have looked
    task = Task(job, device, place.rank)
    turns, failed = [], {}
    for name in job.methods:
        try:
            turns.append(Turn(Contender.of(name, job, task)))
        except (TypeError, ConfigError) as error:
            # Every rank is refused alike: PyTorch's bf16 hook wants NCCL, say.
            failed[name] = str(error)
    for turn in turns:
        _warm(turn, task, place)
    job = replace(job, latency=_latency(place))
    if job.alone:
        for turn in turns:
            turn.alone = alone(turn.contender, job, task, place)
    for count in _rounds(job.iterations):
        for turn in turns:
            _round(turn, task, place, _affordable(turn, count, job.seconds))
    rows = {turn.contender.name: _row(turn, turns[0], job, task, place) for turn in turns}
    if job.trace:
        from gradwire.bench.trace import trace_steps

        trace_steps([turn.contender for turn in turns], task, place, job)
    for turn in turns:
        if turn.contender.wire is not None:
            turn.contender.wire.close()
    for name, why in failed.items():
        rows[name] = StepRow(**_known(name, job, task, place), why=why)
    return [rows[name].asdict() for name in job.methods]


def _latency(place: Place) -> float:
    """Seconds until a small message is at the next rank."""
    assert dist.group.WORLD is not None
    group = DistributedGroup(dist.group.WORLD, place.device)
    _, latency = measure_link(group.all_gather, place.world, place.device)
    return float(place.share(latency))


def _check_gpu(job: Job, place: Place) -> None:
    """Refuses more ranks than fit on the GPUs, before one of them runs out in the middle."""
    if place.device.type != "cuda":
        return
    sharing = -(-place.world // torch.cuda.device_count())
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


def _row(turn: Turn, noop: Turn, job: Job, task: Task, place: Place) -> StepRow:
    contender = turn.contender
    known = _known(contender.name, job, task, place)
    seconds, base = quantiles(turn.times), quantiles(noop.times)["median"]
    exposed = seconds["median"] - base
    sent = contender.bytes_of(task.entries, place.world)
    stages: dict[str, float] = {}
    if contender.wire is not None and turn.before is not None:
        now, before = contender.wire.stats(), turn.before
        steps = now.steps - before.steps
        sent = (now.bytes_sent - before.bytes_sent) // steps
        stages = {k: (now.seconds[k] - v) / steps for k, v in before.seconds.items()}
        known["bundles"] = now.bundles
    return StepRow(
        **known,
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


def _known(name: str, job: Job, task: Task, place: Place) -> dict[str, Any]:
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
