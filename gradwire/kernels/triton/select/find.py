"""Find the bin that holds the k-th largest."""

import triton
import triton.language as tl

from gradwire.kernels.triton.select.turns import COARSE, COARSE_BINS


@triton.jit
def crossing(counts, over, k):
    """Return the ascending bin of the k-th largest, and the number above it; 0, 0 if there is none.

    `over` entries lie above all bins. Return also the number of entries in all bins and above.
    """
    reach = over + tl.cumsum(counts, axis=0, reverse=True)
    here = (reach >= k) & (reach - counts < k)
    i = tl.arange(0, counts.shape[0]).to(tl.int64)
    hit = tl.sum(tl.where(here, (i << 32) + (reach - counts).to(tl.int64), 0))
    return (hit >> 32).to(tl.int32), hit.to(tl.int32), tl.max(reach, axis=0)


@triton.jit
def crossing_in_rows(counts, over, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the results of `crossing` for bins in rows: the row is found first, then the bin."""
    row, above, reach = crossing(tl.sum(counts, axis=1), over, k)
    line = tl.sum(tl.where(tl.arange(0, ROWS)[:, None] == row, counts, 0), axis=0)
    column, above, _ = crossing(line, above, k)
    return row * COLUMNS + column, above, reach


@triton.jit
def find_bin(bins, count, k, SIDE: tl.constexpr):
    """Return the bin, of `count`, that holds the k-th largest, and the number in the bins above."""
    cell = tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    bin = 0
    above = 0
    over = 0
    start = tl.cdiv(count, SIDE * SIDE) * SIDE * SIDE
    while (start > 0) & (over < k):
        start -= SIDE * SIDE
        page = bins + start + cell
        counts = tl.load(page, mask=start + cell < count, other=0, cache_modifier=".cg")
        at, above, over = crossing_in_rows(counts, over, k, SIDE, SIDE)
        bin = start + at
    return bin, above


@triton.jit
def find_coarse_bin(work, k, COPIES: tl.constexpr):
    """Return the results of `find_bin` for the coarse bins.

    Bin b is word b / 64 of line b % 64 of every copy.
    """
    word = tl.arange(0, 32)[:, None]
    line = tl.arange(0, 64)[None, :]
    here = work + COARSE + line * 32 + word
    counts = tl.load(here, cache_modifier=".cg")
    for copy in tl.static_range(1, COPIES):
        counts += tl.load(here + copy * COARSE_BINS, cache_modifier=".cg")
    bin, above, _ = crossing_in_rows(counts, 0, k, 32, 64)
    return bin, above
