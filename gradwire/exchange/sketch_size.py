"""How large a sketch is, and whether it can show anything."""

import math
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.errors import ConfigError
from gradwire.ranks.group import Group

if TYPE_CHECKING:
    from gradwire.exchange.exchange import LocalTask
    from gradwire.plan.work import Work


@dataclass(frozen=True)
class Table:
    """The options of the exchanges by sketch: `rows` x `columns` cells, or d / `ratio` cells.

    candidates: how many entries, for each of the k, are looked at exactly.
    """

    rows: int = 5
    columns: int = 0
    ratio: float = 10.0
    candidates: int = 4

    def __post_init__(self) -> None:
        if self.rows < 1 or self.rows % 2 == 0:
            raise ConfigError(
                f"rows must be odd, for there is a median of them; got {self.rows}: "
                f"use {max(1, self.rows + 1)}"
            )
        if self.columns < 0:
            raise ConfigError(
                f"columns must be at least 1, or 0 for a size by ratio; got {self.columns}"
            )
        if not 1 <= self.ratio < float("inf"):
            raise ConfigError(f"ratio must be at least 1, as many cells as u; got {self.ratio:g}")
        if self.candidates < 1:
            raise ConfigError(
                f"candidates must be at least 1 for each of the k; got {self.candidates}"
            )

    def width(self, size: int) -> int:
        """The columns for a vector of `size` entries."""
        return self.columns or max(1, round(size / self.ratio / self.rows))

    def cells(self, size: int) -> int:
        return self.rows * self.width(size)

    def many(self, size: int, k: int) -> int:
        """How many entries are looked at exactly."""
        return min(size, self.candidates * k)

    def check(self, size: int, k: int) -> None:
        """Raises for a table in which no k entries can be told from the noise, whatever the data.

        An entry is found when it is twice the noise of a cell, |u_(k)| >= 2 ||u|| / sqrt(columns);
        k entries of that size have at most the energy ||u||^2: columns >= 4 k.
        """
        have, need = self.width(size), min(4 * k, size)
        if have < need:
            ratio = int(100 * size / need / self.rows) / 100
            by_ratio = f" or ratio={ratio:g}" if ratio >= 1 and not self.columns else ""
            raise ConfigError(
                f"a sketch of {self.rows} x {have} cells cannot show the {k} largest of {size} "
                f"entries: use columns={need}{by_ratio}, or a lower density"
            )

    def estimate(self, u: Tensor, k: int) -> tuple[int, int]:
        """(shown, columns): how many of the k largest of u it would show, and columns for them all.

        Those of twice the noise of a cell, as above; the noise is what the other entries leave
        there, the root of their energy / columns. Asks the host.
        """
        largest = kernels.select(u, k)[1].double().square()
        rest = (torch.linalg.vector_norm(u, dtype=torch.float64).square() - largest.sum()).relu()
        shown = (largest >= 4 * rest / self.width(u.numel())).sum()
        least = torch.where(largest > 0, largest, math.inf).amin()
        n, energy, edge = torch.stack([shown, rest, least]).tolist()
        return int(n), max(min(4 * k, u.numel()), math.ceil(4 * energy / edge))


def warn_if_blind(sketch: Table, u: Tensor, k: int) -> None:
    """Warns where the noise hides nine in ten of the k largest of u. Asks the host."""
    size = u.numel()
    shown, columns = sketch.estimate(u, k)
    if 10 * shown >= k:
        return
    what = f"use columns={columns}, a ratio of {size / columns / sketch.rows:.3g}"
    if columns * sketch.rows >= size:
        what = "one that does is no smaller than they are: use exchange='oktopk'"
    warnings.warn(
        f"a sketch of {sketch.rows} x {sketch.width(size)} cells shows about {shown} of the {k} "
        f"largest of these {size} entries; {what}",
        stacklevel=2,
    )


def table_prepare(group: Group, size: int, capacity: int, **options: Any) -> None:
    """See `Table.check`."""
    Table(**options).check(size, capacity)


def table_suits(density: float, indices: str) -> bool:
    """False where no table of the usual size can show so many, or indices would be packed twice."""
    return Table().width(10**9) >= 4 * density * 10**9 and indices == "int32"


def table_work(usual: "Work", task: "LocalTask") -> "Work":
    """Every entry into every row, and out of every row again."""
    cells = task.cell * Table.rows * task.size
    many = Table().many(task.size, task.k)
    chosen = task.select(many / task.size, task.size)
    compress = task.floor + task.bundle + chosen + cells
    return replace(usual, compress=compress, encode=cells, decode=task.copies)
