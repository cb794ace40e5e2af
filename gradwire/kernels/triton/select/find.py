"""The bin that holds the k-th largest."""

import triton
import triton.language as tl

from gradwire.kernels.triton.select.turns import COARSE, COARSE_BINS


@triton.jit
def crossing(counts, over, k):
    """Where in ascending bins the k-th largest is, and how many lie above; 0, 0 where nowhere."""
    reach = over + tl.cumsum(counts, axis=0, reverse=True)
    here = (reach >= k) & (reach - counts < k)
    i = tl.arange(0, counts.shape[0]).to(tl.int64)
    hit = tl.sum(tl.where(here, (i << 32) + (reach - counts).to(tl.int64), 0))
    return (hit >> 32).to(tl.int32), hit.to(tl.int32), tl.max(reach, axis=0)


@triton.jit
def inside(counts, over, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The same for bins in rows: the row first, then the bin in it."""
    row, above, reach = crossing(tl.sum(counts, axis=1), over, k)
    line = tl.sum(tl.where(tl.arange(0, ROWS)[:, None] == row, counts, 0), axis=0)
    column, above, _ = crossing(line, above, k)
    return row * COLUMNS + column, above, reach


@triton.jit
def find(bins, count, k, SIDE: tl.constexpr):
    """The bin, of `count`, that holds the k-th largest, and how many are in those above it."""
    cell = tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    where = 0
    above = 0
    over = 0
    start = tl.cdiv(count, SIDE * SIDE) * SIDE * SIDE
    while (start > 0) & (over < k):
        start -= SIDE * SIDE
        there = bins + start + cell
        counts = tl.load(there, mask=start + cell < count, other=0, cache_modifier=".cg")
        at, above, over = inside(counts, over, k, SIDE, SIDE)
        where = start + at
    return where, above


@triton.jit
def find_coarse(work, k, COPIES: tl.constexpr):
    """The same among the coarse bins; bin b is word b / 64 of line b % 64 of every copy."""
    word = tl.arange(0, 32)[:, None]
    line = tl.arange(0, 64)[None, :]
    here = work + COARSE + line * 32 + word
    counts = tl.load(here, cache_modifier=".cg")
    for copy in tl.static_range(1, COPIES):
        counts += tl.load(here + copy * COARSE_BINS, cache_modifier=".cg")
    bin, above, _ = inside(counts, 0, k, 32, 64)
    return bin, above
