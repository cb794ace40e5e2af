"""What a study is: cells to measure, each giving rows, and a page made of all rows."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from gradwire.compress import METHODS
from gradwire.exchange import EXCHANGES
from gradwire.workbench.report.chart import Chart

Cell = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """How a study is run. `small` is for a CPU and two minutes, with embedded data.

    `seeds` and `epochs` choose the cells of a choosy study; 0 is what the study has itself.
    `unfinished` is the folder of runs that were stopped, where they are kept.
    """

    small: bool = False
    data_dir: str | None = None
    device: str = "cpu"
    seed: int = 0
    seeds: int = 0
    epochs: int = 0
    unfinished: str = ""


@dataclass(frozen=True)
class Table:
    """Numbers for people; `note` says what is ours and what the paper's."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Page:
    """What came out: one honest sentence or two, tables, pictures."""

    says: str
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()


@dataclass(frozen=True)
class Study:
    """One question of the papers.

    `cells` lists what is measured: plain JSON values, a cell that is done is not measured again.
    `measure` gives a cell's rows. `page` needs nothing but the rows.
    """

    name: str
    title: str
    figures: str
    cells: Callable[[Settings], list[Cell]]
    measure: Callable[[Settings, Cell], list[Row]]
    page: Callable[[Sequence[Row]], Page]
    files: Sequence[str] = field(default=())
    """Data sets that the full study reads from --data-dir."""
    choosy: bool = False
    """Whether its cells can be chosen by seeds and epochs."""
    timed: bool = False
    """Whether its cells are times, which others side by side would make longer."""


def there(name: str) -> bool:
    """Whether this version has "method" or "method/exchange"."""
    method, _, exchange = name.partition("/")
    return method in METHODS and (not exchange or exchange in EXCHANGES)


def listed(names: Iterable[str]) -> str:
    """ "a, b and c"; "none" where there is none."""
    found = list(names)
    if len(found) < 2:
        return found[0] if found else "none"
    return f"{', '.join(found[:-1])} and {found[-1]}"


@contextmanager
def repeatable(settings: Settings) -> Iterator[None]:
    """The same seed gives the same numbers: one thread on CPU, where small networks are faster so,
    and deterministic convolutions on CUDA."""
    threads, convolutions = torch.get_num_threads(), torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    if settings.device == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.deterministic = convolutions
