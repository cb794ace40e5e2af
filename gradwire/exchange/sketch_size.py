"""Size of a sketch, and an estimate of how many of the largest entries it shows."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.errors import ConfigError

if TYPE_CHECKING:
    from gradwire.exchange.exchange import LocalTask
    from gradwire.plan.work import Work


@dataclass(frozen=True)
class SketchSize:
    """Options of the exchanges by sketch: `rows` x `columns` cells, or d / `ratio` cells.

    candidates: the number of entries, for each of the k, at which exact values are added; 0: as
    many as there are ranks.
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
        if self.candidates < 0:
            raise ConfigError(
                f"candidates must be at least 1 for each of the k, or 0 for the number of ranks; "
                f"got {self.candidates}"
            )

    def column_count(self, size: int) -> int:
        """Return the columns for a vector of `size` entries."""
        return self.columns or max(1, round(size / self.ratio / self.rows))

    def cell_count(self, size: int) -> int:
        """Return the cells for a vector of `size` entries."""
        return self.rows * self.column_count(size)

    def candidate_count(self, size: int, k: int, ranks: int) -> int:
        """Return the number of entries at which exact values are added."""
        return min(size, (self.candidates or ranks) * k)

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


def sketch_suits(density: float, indices: str) -> bool:
    """Return False if no sketch of the usual size can show the entries, or indices would be packed.

    Packing would have no effect, because no indices travel.
    """
    return SketchSize().column_count(10**9) >= 4 * density * 10**9 and indices == "int32"


def sketch_work(usual: "Work", task: "LocalTask") -> "Work":
    """Return the work: every entry into every row, and out of every row again."""
    sketching = task.cell * SketchSize.rows * task.size
    candidates = SketchSize().candidate_count(task.size, task.k, task.ranks)
    chosen = task.select(candidates / task.size, task.size)
    compress = task.floor + task.bundle + chosen + sketching
    return replace(usual, compress=compress, encode=sketching, decode=task.copies)
