"""The timeline of one step: spans of the computation, and of each bundle's stages."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from gradwire.stages import Clock, Mark
from gradwire.state.state import State
from gradwire.torch_internals import profile_all_threads
from gradwire.workbench.bench.contender import Contender
from gradwire.workbench.bench.job import Job
from gradwire.workbench.bench.task import Task
from gradwire.workbench.train.worker import Worker

COMPUTE = "compute"


@dataclass(frozen=True)
class Span:
    """A part of a step; begin and end are seconds since the step began.

    lane: COMPUTE, or the number of a bundle.
    """

    name: str
    lane: str
    begin: float
    end: float


def trace_steps(contenders: Sequence[Contender], task: Task, worker: Worker, job: Job) -> None:
    """Record one step of each contender, and write files to the job's folder (collective).

    timeline.png: all contenders. METHOD.trace.json: the same spans for chrome://tracing.
    METHOD.profile.json: torch.profiler's view of another step. Only rank 0 writes.
    """
    from gradwire.workbench.bench.timeline import draw_timeline

    folder = Path(job.trace)
    folder.mkdir(parents=True, exist_ok=True)
    spans_of: dict[str, list[Span]] = {}
    for contender in contenders:
        # Not recorded: the first step after another contender's is not a typical one.
        contender.step(task)
        worker.barrier()
        spans_of[contender.name] = record_spans(contender, task)
        worker.barrier()
        _profile_step(contender, task, folder if worker.first else None)
    if not worker.first:
        return
    for name, spans in spans_of.items():
        path = folder / f"{trace_file_stem(name)}.trace.json"
        path.write_text(json.dumps(chrome_trace(name, spans)))
    title = f"{job.model}, {worker.world} ranks, {job.link or 'no shaped link'}, batch {job.batch}"
    draw_timeline(spans_of, folder / "timeline.png", title)


def record_spans(contender: Contender, task: Task) -> list[Span]:
    """Take one step, and return its spans."""
    clock, wire = Clock(task.device), contender.wire
    arrived: dict[int, Mark] = {}
    handles = [
        p.register_post_accumulate_grad_hook(lambda p: arrived.update({id(p): clock.mark()}))
        for p in task.model.parameters()
    ]
    if wire is not None:
        wire.clock.log = []
    marks = [clock.mark()]
    loss = task.forward(contender.model)
    marks.append(clock.mark())
    loss.backward()
    last_gradient = list(arrived.values())[-1]
    marks.append(clock.mark())
    task.update()
    marks.append(clock.mark())
    for handle in handles:
        handle.remove()
    if task.device.type == "cuda":
        torch.cuda.synchronize(task.device)
    names = ("forward", "backward", "wait", "optimizer")
    edges = [marks[0], marks[1], last_gradient, marks[2], marks[3]]
    at = [seconds_between(marks[0], mark) for mark in edges]
    spans = [Span(n, COMPUTE, a, b) for n, a, b in zip(names, at, at[1:], strict=False)]
    if wire is not None:
        arrived_at = {key: seconds_between(marks[0], mark) for key, mark in arrived.items()}
        spans += _bundle_spans(wire, marks[0], arrived_at)
        wire.clock.log = None
    return spans


def _bundle_spans(wire: State, start: Mark, arrived: dict[int, float]) -> list[Span]:
    """Return the stages of each bundle, and its wait: from its last gradient to its first stage."""
    stages = [
        Span(name, str(bundle), seconds_between(start, begin), seconds_between(start, end))
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


def seconds_between(start: Mark, mark: Mark) -> float:
    """Return the seconds from one mark to another of the same clock."""
    if isinstance(start, float) and isinstance(mark, float):
        return mark - start
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(mark, torch.cuda.Event)
    return start.elapsed_time(mark) / 1e3


def chrome_trace(name: str, spans: Sequence[Span]) -> dict[str, object]:
    """Return the spans in the format of chrome://tracing and Perfetto."""
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


def trace_file_stem(method: str) -> str:
    """Replace the characters of `topk/union:bundle_mb=100` that a file name should not have."""
    return "".join(c if c.isalnum() or c in "-_.=" else "-" for c in method)


def _profile_step(contender: Contender, task: Task, folder: Path | None) -> None:
    """Take one more step, on rank 0 under torch.profiler; gradwire's thread is included.

    folder: None on the other ranks.
    """
    if folder is None:
        contender.step(task)
        return
    kinds = [ProfilerActivity.CPU]
    if task.device.type == "cuda":
        kinds.append(ProfilerActivity.CUDA)
    config = profile_all_threads()
    with profile(activities=kinds, experimental_config=config, acc_events=True) as profiled:
        contender.step(task)
    profiled.export_chrome_trace(str(folder / f"{trace_file_stem(contender.name)}.profile.json"))
