"""Size of a sketch, and the check that it can show the largest entries."""

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
class SketchSize:
    """Options of the exchanges by sketch: `rows` x `columns` cells, or d / `ratio` cells.

    candidates: the number of entries, for each of the k, at which exact values are added.
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

    def column_count(self, size: int) -> int:
        """Return the columns for a vector of `size` entries."""
        return self.columns or max(1, round(size / self.ratio / self.rows))

    def cell_count(self, size: int) -> int:
        """Return the cells for a vector of `size` entries."""
        return self.rows * self.column_count(size)

    def candidate_count(self, size: int, k: int) -> int:
        """Return the number of entries at which exact values are added."""
        return min(size, self.candidates * k)

    def check(self, size: int, k: int) -> None:
        """Raise ConfigError for a sketch in which noise hides the k largest entries, whatever the
        data.

        An entry is found if it is twice the noise of a cell, |u_(k)| >= 2 ||u|| / sqrt(columns). k
        entries of that size have at most the energy ||u||^2, so columns >= 4 k.
        """
        columns, needed = self.column_count(size), min(4 * k, size)
        if columns < needed:
            ratio = int(100 * size / needed / self.rows) / 100
            by_ratio = f" or ratio={ratio:g}" if ratio >= 1 and not self.columns else ""
            raise ConfigError(
                f"a sketch of {self.rows} x {columns} cells cannot show the {k} largest of {size} "
                f"entries: use columns={needed}{by_ratio}, or a lower density"
            )

    def estimate(self, u: Tensor, k: int) -> tuple[int, int]:
        """Return (shown, columns): how many of the k largest of u show, and the columns that show
        all.

        An entry shows if it is twice the noise of a cell. The noise is the root of (energy of the
        other entries) / columns. The host waits for the result.
        """
        largest = kernels.select(u, k)[1].double().square()
        other_energy = (
            torch.linalg.vector_norm(u, dtype=torch.float64).square() - largest.sum()
        ).relu()
        shown = (largest >= 4 * other_energy / self.column_count(u.numel())).sum()
        least_energy = torch.where(largest > 0, largest, math.inf).amin()
        count, energy, smallest = torch.stack([shown, other_energy, least_energy]).tolist()
        return int(count), max(min(4 * k, u.numel()), math.ceil(4 * energy / smallest))


def warn_if_blind(sketch: SketchSize, u: Tensor, k: int) -> None:
    """Warn if the noise hides nine in ten of the k largest of u. The host waits for the answer."""
    size = u.numel()
    shown, columns = sketch.estimate(u, k)
    if 10 * shown >= k:
        return
    advice = f"use columns={columns}, a ratio of {size / columns / sketch.rows:.3g}"
    if columns * sketch.rows >= size:
        advice = "one that does is no smaller than they are: use exchange='oktopk'"
    warnings.warn(
        f"a sketch of {sketch.rows} x {sketch.column_count(size)} cells shows about {shown} of "
        f"the {k} largest of these {size} entries; {advice}",
        stacklevel=2,
    )


def sketch_prepare(group: Group, size: int, capacity: int, **options: Any) -> None:
    """Raise ConfigError for a sketch that is too small: see `SketchSize.check`."""
    SketchSize(**options).check(size, capacity)


def sketch_suits(density: float, indices: str) -> bool:
    """Return False if no sketch of the usual size can show the entries, or indices would be packed.

    Packing would have no effect, because no indices travel.
    """
    return SketchSize().column_count(10**9) >= 4 * density * 10**9 and indices == "int32"


def sketch_work(usual: "Work", task: "LocalTask") -> "Work":
    """Return the work: every entry into every row, and out of every row again."""
    sketching = task.cell * SketchSize.rows * task.size
    candidates = SketchSize().candidate_count(task.size, task.k)
    chosen = task.select(candidates / task.size, task.size)
    compress = task.floor + task.bundle + chosen + sketching
    return replace(usual, compress=compress, encode=sketching, decode=task.copies)
