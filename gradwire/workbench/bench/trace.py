"""Where one step's time went: spans of the backward pass and of every bundle's stages."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from gradwire.integrate.attached import Attached
from gradwire.stages import Clock, Mark
from gradwire.workbench.bench.contender import Contender, Task
from gradwire.workbench.bench.job import Job
from gradwire.workbench.train.place import Place

COMPUTE = "compute"


@dataclass(frozen=True)
class Span:
    """Seconds since the step began. lane: COMPUTE, or the number of a bundle."""

    name: str
    lane: str
    begin: float
    end: float


def trace_steps(contenders: Sequence[Contender], task: Task, place: Place, job: Job) -> None:
    """One step of each, after one that is not looked at, as files in the job's folder.

    timeline.png: all of them; METHOD.trace.json: the same spans for chrome://tracing;
    METHOD.profile.json: torch.profiler's view of another step. Rank 0 writes (collective).
    """
    from gradwire.workbench.bench.timeline import draw_timeline

    folder = Path(job.trace)
    folder.mkdir(parents=True, exist_ok=True)
    seen: dict[str, list[Span]] = {}
    for contender in contenders:
        contender.step(task)
        place.barrier()
        seen[contender.name] = record(contender, task)
        place.barrier()
        _profile(contender, task, folder if place.first else None)
    if not place.first:
        return
    for name, spans in seen.items():
        path = folder / f"{file_name(name)}.trace.json"
        path.write_text(json.dumps(chrome(name, spans)))
    title = f"{job.model}, {place.world} ranks, {job.link or 'no shaped link'}, batch {job.batch}"
    draw_timeline(seen, folder / "timeline.png", title)


def record(contender: Contender, task: Task) -> list[Span]:
    """The spans of one step."""
    clock, wire = Clock(task.device), contender.wire
    arrived: dict[int, Mark] = {}
    handles = [
        p.register_post_accumulate_grad_hook(lambda p: arrived.update({id(p): clock.mark()}))
        for p in task.model.parameters()
    ]
    if wire is not None:
        wire.clock.log = []
    marks = [clock.mark()]
    loss = task.forward(contender.ddp)
    marks.append(clock.mark())
    loss.backward()
    last = list(arrived.values())[-1]
    marks.append(clock.mark())
    task.update()
    marks.append(clock.mark())
    for handle in handles:
        handle.remove()
    if task.device.type == "cuda":
        torch.cuda.synchronize(task.device)
    names = ("forward", "backward", "wait", "optimizer")
    edges = [marks[0], marks[1], last, marks[2], marks[3]]
    at = [seconds(marks[0], mark) for mark in edges]
    spans = [Span(n, COMPUTE, a, b) for n, a, b in zip(names, at, at[1:], strict=False)]
    if wire is not None:
        spans += _of_bundles(wire, marks[0], {k: seconds(marks[0], m) for k, m in arrived.items()})
        wire.clock.log = None
    return spans


def _of_bundles(wire: Attached, start: Mark, arrived: dict[int, float]) -> list[Span]:
    """A bundle's stages, and before them its wait: from its last gradient to its first stage."""
    stages = [
        Span(name, str(bundle), seconds(start, begin), seconds(start, end))
        for name, bundle, begin, end in wire.clock.log or ()
    ]
    names = wire.model_names or {}
    ready: dict[str, float] = {}
    for key, when in arrived.items():
        lane = str(wire.home(names[key])[0].index)
        ready[lane] = max(ready.get(lane, 0.0), when)
    first: dict[str, float] = {}
    for span in stages:
        first.setdefault(span.lane, span.begin)
    waits = [Span("wait", k, ready[k], v) for k, v in first.items() if v > ready[k]]
    return waits + stages


def seconds(start: Mark, mark: Mark) -> float:
    """From one mark to another of the same clock."""
    if isinstance(start, float) and isinstance(mark, float):
        return mark - start
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(mark, torch.cuda.Event)
    return start.elapsed_time(mark) / 1e3


def chrome(name: str, spans: Sequence[Span]) -> dict[str, object]:
    """The spans as chrome://tracing and Perfetto read them."""
    lanes = list(dict.fromkeys(span.lane for span in spans))
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": name}}
    ]
    for lane in lanes:
        title = lane if lane == COMPUTE else f"bundle {lane}"
        args = {"name": title}
        events.append(
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": lanes.index(lane), "args": args}
        )
    for span in spans:
        ts, dur = 1e6 * span.begin, 1e6 * (span.end - span.begin)
        tid = lanes.index(span.lane)
        events.append({"ph": "X", "name": span.name, "pid": 0, "tid": tid, "ts": ts, "dur": dur})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def file_name(method: str) -> str:
    """topk/union:bundle_mb=100 without what a file name should not have."""
    return "".join(c if c.isalnum() or c in "-_.=" else "-" for c in method)


def _profile(contender: Contender, task: Task, folder: Path | None) -> None:
    """One more step, on rank 0 under torch.profiler, gradwire's thread included."""
    if folder is None:
        contender.step(task)
        return
    kinds = [ProfilerActivity.CPU]
    if task.device.type == "cuda":
        kinds.append(ProfilerActivity.CUDA)
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=kinds, experimental_config=config, acc_events=True) as seen:
        contender.step(task)
    seen.export_chrome_trace(str(folder / f"{file_name(contender.name)}.profile.json"))
