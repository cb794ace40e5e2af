"""Define a study: a list of cells to measure, rows per cell, and a page made from all rows."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from gradwire.compress import METHODS
from gradwire.exchange import EXCHANGES
from gradwire.workbench.report.chart import Chart

Cell = dict[str, Any]
"""One measurement to do, as plain JSON values."""
StudyRow = dict[str, Any]
"""One measured result, as plain JSON values."""
Runs = dict[str, dict[int, list[StudyRow]]]
"""The rows of each training run, by recipe and seed."""
Task = TypeVar("Task")


@dataclass(frozen=True)
class Settings:
    """The settings of a study.

    small: True for a version that takes two minutes on a CPU, with embedded data.
    seeds, epochs: choose the cells of a study that takes them; 0 for the study's default.
    chosen: other choices of cells, by name, as the command line has them.
    extend: let the results choose further cells, as `Study.more` lists them.
    unfinished: the folder that keeps interrupted training runs; "" to keep none.
    """

    small: bool = False
    data_dir: str | None = None
    device: str = "cpu"
    seed: int = 0
    seeds: int = 0
    epochs: int = 0
    unfinished: str = ""
    chosen: Mapping[str, str] = field(default_factory=dict)
    extend: bool = False

    @property
    def choices(self) -> list[str]:
        """The names of all choices of cells that were made."""
        names = ("seeds", "epochs", "extend")
        return [*(name for name in names if getattr(self, name)), *self.chosen]


@dataclass(frozen=True)
class StudyTable:
    """A table of texts for readers. `note` explains the columns and names the source of numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Page:
    """The result of a study: a few sentences, tables and charts."""

    summary: str
    tables: Sequence[StudyTable] = ()
    charts: Sequence[Chart] = ()


@dataclass(frozen=True)
class Study:
    """One question, and the functions that answer it.

    figures: the figures or the paper that the study repeats.
    cells: lists the measurements. A cell that is already in the study's folder is not repeated.
    measure: returns the rows of one cell.
    page: makes the page from the rows alone.
    """

    name: str
    title: str
    figures: str
    cells: Callable[[Settings], list[Cell]]
    measure: Callable[[Settings, Cell], list[StudyRow]]
    page: Callable[[Sequence[StudyRow]], Page]
    files: Sequence[str] = field(default=())
    """Data sets that the full study reads from --data-dir."""
    choices: Sequence[str] = ()
    """Choices of cells that the study takes, for instance "seeds"."""
    more: Callable[[Settings, Sequence[StudyRow], Sequence[Cell]], list[Cell]] | None = None
    """Lists the cells that the rows so far ask for, given those that are still to come."""
    in_cells: Sequence[str] = ()
    """Settings that every cell or row holds, so that one folder may have several of them."""
    timed: bool = False
    """True: the study measures times, so its cells must not run side by side."""


def is_registered(name: str) -> bool:
    """Return True if this version has the method, and the exchange, of "method/exchange"."""
    method, _, exchange = name.partition("/")
    return method in METHODS and (not exchange or exchange in EXCHANGES)


def join_names(names: Iterable[str]) -> str:
    """Return the names as "a, b and c", or "none"."""
    items = list(names)
    if len(items) < 2:
        return items[0] if items else "none"
    return f"{', '.join(items[:-1])} and {items[-1]}"


def group_runs(rows: Iterable[StudyRow], task_of: Callable[[StudyRow], Task]) -> dict[Task, Runs]:
    """Return the runs of each task; tasks, recipes and seeds keep the order of the rows."""
    tasks: dict[Task, Runs] = {}
    for row in rows:
        seeds = tasks.setdefault(task_of(row), {}).setdefault(row["recipe"], {})
        seeds.setdefault(row["seed"], []).append(row)
    return tasks


@contextmanager
def repeatable(settings: Settings) -> Iterator[None]:
    """Make the same seed give the same numbers inside the block.

    A CPU uses one thread, which is also faster for small networks. CUDA uses deterministic
    convolutions.
    """
    threads, convolutions = torch.get_num_threads(), torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    if settings.device == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.deterministic = convolutions
