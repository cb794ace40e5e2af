"""The table of a Count-Sketch: its hashes, its largest estimates, and a warning if it is small."""

import warnings

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.exchange.sketch_size import SketchSize
from gradwire.hashing import fmix32
from gradwire.kernels.select import block_size
from gradwire.ranks.group import Group
from gradwire.types import Memory

STEPS = "sketch.steps"
_WARNED = "sketch.warned"


def next_seeds(memory: Memory, rows: int, device: torch.device) -> Tensor:
    """Return int32 [rows], other seeds at every step, the same on every rank."""
    if STEPS not in memory:
        memory[STEPS] = torch.zeros((), dtype=torch.int64, device=device)
    steps = memory[STEPS]
    numbers = steps * rows + torch.arange(1, rows + 1, dtype=torch.int64, device=device)
    steps.add_(1)
    return fmix32(fmix32(numbers.to(torch.int32)) + 1)


def find_largest(table: Tensor, seeds: Tensor, size: int, count: int) -> Tensor:
    """Return the ascending int32 indices of the `count` largest estimates."""
    # Sums beyond fp32 are infinite, and their differences have no size.
    table = table.nan_to_num()
    group = block_size(size, count, table.device)
    magnitudes, maxima = kernels.query(table, seeds, size, group)
    return kernels.topk(magnitudes, count, maxima, group)


def warn_if_small(sketch: SketchSize, u: Tensor, k: int, group: Group, memory: Memory) -> None:
    """Warn on rank 0, in the first step and when k changes, if the table hides most of u's largest.

    That is so if noise hides nine in ten of them, or if there are fewer than 4 k columns. The
    warning says what share of their energy the candidates hold. The host waits for the answer.
    """
    seen = memory.derived.get(_WARNED)
    resumed = seen is None and STEPS in memory
    if group.rank or not k or resumed or (seen is not None and int(seen) == k):
        return
    memory.derived[_WARNED] = torch.tensor(k, dtype=torch.int64)
    size = u.numel()
    shown, columns = sketch.estimate(u, k)
    narrow = sketch.column_count(size) < min(4 * k, size)
    if 10 * shown >= k and not narrow:
        return
    advice = f"use columns={columns}, a ratio of {size / columns / sketch.rows:.3g}"
    if columns * sketch.rows >= size:
        advice = "one that does is no smaller than they are: use exchange='oktopk'"
    share = energy_share(sketch, u, k, group.size)
    warnings.warn(
        f"a sketch of {sketch.rows} x {sketch.column_count(size)} cells shows about {shown} of "
        f"the {k} largest of these {size} entries, and its candidates hold {share:.1%} of their "
        f"energy; {advice}",
        stacklevel=2,
    )


def energy_share(sketch: SketchSize, u: Tensor, k: int, ranks: int) -> float:
    """Return the energy of the k largest of a sketch's candidates, over that of the k largest."""
    size = u.numel()
    seeds = next_seeds(Memory(), sketch.rows, u.device)
    table = kernels.insert(u, sketch.column_count(size), seeds)
    found = find_largest(table, seeds, size, sketch.candidate_count(size, k, ranks))
    taken = kernels.select(u[found], min(k, found.numel()))[1]
    energy, whole = (x.double().square().sum() for x in (taken, kernels.select(u, k)[1]))
    return float(energy / whole) if whole else 1.0
