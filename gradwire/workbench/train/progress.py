"""Progress of a run: a bar on a terminal, one line per epoch elsewhere."""

import sys
from typing import Any, Protocol

from gradwire.workbench.train.metrics import Record
from gradwire.workbench.train.task import TrainTask


class Progress(Protocol):
    """A display that is called for every step and every record."""

    def step(self, step: int) -> None: ...
    def record(self, record: Record) -> None: ...
    def close(self) -> None: ...


def make_progress(title: str, task: TrainTask, steps: int, epochs: int, wanted: bool) -> Progress:
    """Return a bar on a terminal with rich installed, otherwise lines; silent if not `wanted`."""
    if not wanted:
        return _Silent()
    if sys.stdout.isatty():
        try:
            return _Bar(title, task, steps)
        except ImportError:
            pass
    return _Lines(title, task, steps, epochs)


class _Silent:
    """No display."""

    def step(self, step: int) -> None: ...
    def record(self, record: Record) -> None: ...
    def close(self) -> None: ...


class _Lines:
    """One line per epoch."""

    def __init__(self, title: str, task: TrainTask, steps: int, epochs: int) -> None:
        self.title, self.task, self.steps, self.epochs = title, task, steps, epochs

    def step(self, step: int) -> None: ...

    def record(self, record: Record) -> None:
        if record.score is not None:
            position = f"epoch {record.epoch}/{self.epochs}  step {record.step}/{self.steps}"
            words = _describe_record(record, self.task, record.score)
            print(f"{self.title}  {position}  {words}  {record.seconds:.1f} s", flush=True)

    def close(self) -> None: ...


class _Bar:
    """A rich progress bar."""

    def __init__(self, title: str, task: TrainTask, steps: int) -> None:
        from rich import progress

        self.bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[numbers]}"),
            progress.TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        )
        self.score: float | None = None
        self.task = task
        self.bar_id: Any = self.bar.add_task(title, total=steps, numbers="")
        self.bar.start()

    def step(self, step: int) -> None:
        self.bar.update(self.bar_id, completed=step)

    def record(self, record: Record) -> None:
        self.score = self.score if record.score is None else record.score
        self.bar.update(self.bar_id, numbers=_describe_record(record, self.task, self.score))

    def close(self) -> None:
        self.bar.stop()


def _describe_record(record: Record, task: TrainTask, score: float | None) -> str:
    """Return the record and the last score in a few words."""
    words = [f"loss {record.loss:.4f}"]
    if score is not None:
        words.append(f"{task.measure} {task.words(score)}")
    if record.bytes_sent:
        words.append(f"{_compare_bytes(record.bytes_sent, record.bytes_dense)} bytes")
    return "  ".join(words)


def _compare_bytes(sent: int, dense: int) -> str:
    """Return the bytes `sent`, compared with `dense`, in words, e.g. "23x fewer"."""
    ratio = dense / sent if sent else float("inf")
    if 0.995 <= ratio <= 1.005:
        return "as many"
    return f"{ratio:.3g}x fewer" if ratio > 1 else f"{1 / ratio:.3g}x more"
