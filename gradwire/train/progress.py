"""What is shown while a run goes: a bar on a terminal, a line an epoch elsewhere."""

import sys
from typing import Any, Protocol

from gradwire.train.metrics import Record


class Progress(Protocol):
    """Told about every step and every record; shows what it likes."""

    def step(self, step: int) -> None: ...
    def record(self, record: Record) -> None: ...
    def close(self) -> None: ...


def show(title: str, steps: int, epochs: int, wanted: bool) -> Progress:
    """A bar if this is a terminal and rich is installed, lines otherwise; nothing if not wanted."""
    if not wanted:
        return Silent()
    if sys.stdout.isatty():
        try:
            return Bar(title, steps)
        except ImportError:
            pass
    return Lines(title, steps, epochs)


class Silent:
    """Shows nothing."""

    def step(self, step: int) -> None: ...
    def record(self, record: Record) -> None: ...
    def close(self) -> None: ...


class Lines:
    """One line an epoch."""

    def __init__(self, title: str, steps: int, epochs: int) -> None:
        self.title, self.steps, self.epochs = title, steps, epochs

    def step(self, step: int) -> None: ...

    def record(self, record: Record) -> None:
        if record.test_accuracy is not None:
            at = f"epoch {record.epoch}/{self.epochs}  step {record.step}/{self.steps}"
            print(f"{self.title}  {at}  {describe(record)}  {record.seconds:.1f} s", flush=True)

    def close(self) -> None: ...


class Bar:
    """A rich progress bar."""

    def __init__(self, title: str, steps: int) -> None:
        from rich import progress

        self.bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[numbers]}"),
            progress.TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        )
        self.accuracy: float | None = None
        self.task: Any = self.bar.add_task(title, total=steps, numbers="")
        self.bar.start()

    def step(self, step: int) -> None:
        self.bar.update(self.task, completed=step)

    def record(self, record: Record) -> None:
        self.accuracy = record.test_accuracy or self.accuracy
        self.bar.update(self.task, numbers=describe(record, self.accuracy))

    def close(self) -> None:
        self.bar.stop()


def describe(record: Record, accuracy: float | None = None) -> str:
    """The record in a few words."""
    accuracy = record.test_accuracy if record.test_accuracy is not None else accuracy
    words = [f"loss {record.loss:.4f}"]
    if accuracy is not None:
        words.append(f"accuracy {100 * accuracy:.1f} %")
    if record.bytes_sent:
        words.append(f"{fewer(record.bytes_sent, record.bytes_dense)} bytes")
    return "  ".join(words)


def fewer(sent: int, dense: int) -> str:
    """How many times fewer `sent` is than `dense`, e.g. "23x fewer"."""
    ratio = dense / sent if sent else float("inf")
    if 0.995 <= ratio <= 1.005:
        return "as many"
    return f"{ratio:.3g}x fewer" if ratio > 1 else f"{1 / ratio:.3g}x more"
