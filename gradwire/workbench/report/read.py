"""Read run folders for the report."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.errors import ConfigError, StateError
from gradwire.workbench.train.folder import (
    CONFIG,
    METRICS,
    compare_folder,
    read_command,
    read_config,
    read_machine,
    read_result,
)
from gradwire.workbench.train.metrics import read_records
from gradwire.workbench.train.options import Options
from gradwire.workbench.train.task import TrainTask

COLUMNS = ("step", "epoch", "bytes_sent", "bytes_dense", "achieved_density", "seconds")
"""Columns that every line of metrics must have, with a number of at least 0."""


@dataclass(frozen=True)
class Run:
    """One run: its options, its lines of metrics, and its result if the run has ended."""

    options: Options
    command: str
    machine: dict[str, str]
    records: list[dict[str, Any]]
    result: dict[str, Any]

    @property
    def title(self) -> str:
        return self.options.title

    @property
    def task(self) -> TrainTask:
        return self.options.task

    @property
    def score(self) -> float | None:
        """The last score on the test set."""
        return self.last(self.task.column)

    @property
    def dense(self) -> bool:
        return self.options.method == "dense" and not self.options.has_rounds

    @property
    def steps(self) -> int:
        """Steps done so far."""
        # The result may stem from before a resume, and not every step has a line of metrics.
        steps = self.result.get("steps")
        return max(steps if isinstance(steps, int) else 0, self.last("step") or 0)

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Return the steps and values of a column, for the lines that have a value."""
        rows = [r for r in self.records if r.get(name) is not None]
        return [r["step"] for r in rows], [r[name] for r in rows]

    def last(self, name: str) -> Any:
        """Return the last value of a column, or None."""
        values = self.series(name)[1]
        return values[-1] if values else None


def read_runs(folder: Path) -> list[Run]:
    """Return the run in `folder`, then each run to compare it with that has begun."""
    options = read_config(folder)
    others = [compare_folder(folder, name) for name in options.compare]
    runs = [_read_run(f) for f in [folder, *others] if (f / CONFIG).is_file()]
    if not any(run.records for run in runs):
        raise ConfigError(f"{folder} has no metrics yet: {METRICS} is empty. Let the run go on.")
    return runs


def _read_run(folder: Path) -> Run:
    records = read_records(folder / METRICS)
    for number, record in enumerate(records, start=1):
        for name in COLUMNS:
            if record.get(name) is None or record[name] < 0:
                raise StateError(
                    f"{folder / METRICS}, line {number}: {name} is {record.get(name)}, "
                    f"not a number of at least 0"
                )
    return Run(
        options=read_config(folder),
        command=read_command(folder),
        machine=read_machine(folder),
        records=records,
        result=read_result(folder) or {},
    )
