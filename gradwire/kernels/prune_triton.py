"""Phase one of topk: a bound from a sample, and every entry that reaches it.

The k-th largest group maximum is never above the k-th largest magnitude, so a group whose maximum
is below it cannot hold a winner. A sample of the maxima gives a bound a little lower; the number of
entries that reach it says whether it was low enough.
"""

import triton
import triton.language as tl

from gradwire.kernels.order_triton import cells, order
from gradwire.kernels.scan_triton import magnitude
from gradwire.kernels.turns_triton import COARSE, COARSE_BINS

SECTOR = tl.constexpr(8)


@triton.jit
def _sample(values, n, STRATA: tl.constexpr):
    """Bits of STRATA sectors of 32 bytes, each at a hashed place in its own stretch; -1 past n.

    Hashed, so that no period in the data goes unseen.
    """
    stretch = tl.arange(0, STRATA)
    sector = stretch
    if n > STRATA * SECTOR:
        sectors = n // SECTOR
        width = sectors // STRATA
        hashed = tl.umulhi(stretch.to(tl.uint32) * 0x9E3779B1, width.to(tl.uint32)).to(tl.int32)
        sector = stretch * width + stretch * (sectors % STRATA) // STRATA + hashed
    at = sector[:, None] * SECTOR + tl.arange(0, SECTOR)[None, :]
    bits = magnitude(tl.load(values + at, mask=at < n, other=0))
    return tl.where(at < n, bits, -1)


@triton.jit
def bound(values, n, rank, SAMPLE: tl.constexpr):
    """A bound that `rank` of the sample reach, its last 15 bits clear; how many do; the largest.

    Reads 4 * SAMPLE bytes.
    """
    bits = _sample(values, n, SAMPLE // SECTOR)
    t = 0
    count = tl.minimum(n, SAMPLE)
    for step in range(8):
        # Three counts in one sum, ten bits each in a sector, twenty in all: two bits of t a round.
        one = 1 << (29 - 2 * step)
        marks = (bits >= t + one).to(tl.int32)
        marks += (bits >= t + 2 * one).to(tl.int32) << 10
        marks += (bits >= t + 3 * one).to(tl.int32) << 20
        sector = tl.sum(marks, axis=1).to(tl.int64)
        counts = tl.sum(((sector >> 20) << 40) + (((sector >> 10) & 1023) << 20) + (sector & 1023))
        c1 = (counts & 0xFFFFF).to(tl.int32)
        c2 = ((counts >> 20) & 0xFFFFF).to(tl.int32)
        c3 = (counts >> 40).to(tl.int32)
        count = tl.where(c3 >= rank, c3, tl.where(c2 >= rank, c2, tl.where(c1 >= rank, c1, count)))
        t += one * tl.where(c3 >= rank, 3, tl.where(c2 >= rank, 2, tl.where(c1 >= rank, 1, 0)))
    return t, count, tl.max(tl.max(bits, axis=1), axis=0)


@triton.jit
def _maxima(maxima, j, last):
    """Their bits, 0 past the end: no bound is as low."""
    return magnitude(tl.load(maxima + j, mask=j < last, other=0))


@triton.jit
def compact(maxima, ids, first, last, t, ROWS: tl.constexpr):
    """How many groups in [first, last) reach t; their ids, ascending, go to `ids`.

    Moves 4 bytes a group. The next tile is on its way while this one is looked at.
    """
    count = 0
    j = first + cells(ROWS, last)
    bits = _maxima(maxima, j, last)
    for _ in range(first, last, 128 * ROWS):
        later = _maxima(maxima, j + 128 * ROWS, last)
        ones = (bits >= t).to(tl.int32)
        place, found = order(ones, ROWS)
        tl.store(ids + count + place, j, mask=ones != 0)
        count += found
        j += 128 * ROWS
        bits = later
    return count


@triton.jit
def _deposit(work, cand, t, shift, raw, index, place, counted, limit):
    """Candidates with place < limit go to memory; those from `counted` on also into the bins."""
    bits = raw & 0x7FFFFFFF
    fits = (bits >= t) & (place < limit)
    tl.store(cand + place, (raw.to(tl.int64) << 32) | index.to(tl.int64), mask=fits)
    bin = tl.minimum((bits - t) >> shift, COARSE_BINS - 1)
    ones = tl.full(bin.shape, 1, tl.int32)
    tl.atomic_add(work + COARSE + bin, ones, mask=fits & (place >= counted), sem="relaxed")


@triton.jit
def gather(
    work, u, size, ids, groups, t, shift, cand, counted, limit,
    GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """How many entries of the named groups reach t; the first `limit` of them are kept.

    Moves 4 * GROUP bytes a group, 8 a candidate.
    """
    found = 0
    e = cells(ROWS, size)
    for start in range(0, groups, 128 * ROWS // GROUP):
        slot = start + e // GROUP
        index = tl.load(ids + slot, mask=slot < groups, other=0) * GROUP + e % GROUP
        # The last group's entries may lie past the end, but not past 2^31 - 1.
        inside = (slot < groups) & (index < size)
        x = tl.load(u + index, mask=inside, other=0).to(tl.float32)
        raw = x.to(tl.int32, bitcast=True)
        place, more = order(((raw & 0x7FFFFFFF) >= t).to(tl.int32), ROWS)
        _deposit(work, cand, t, shift, raw, index, found + place, counted, limit)
        found += more
    return found


@triton.jit
def gather_all(work, u, first, last, t, shift, cand, counted, limit, ROWS: tl.constexpr):
    """The same for every entry in [first, last): where groups would rule out too little."""
    found = 0
    e = cells(ROWS, shift)
    for start in range(first, last, 128 * ROWS):
        x = tl.load(u + start + e, mask=e < last - start, other=0).to(tl.float32)
        raw = x.to(tl.int32, bitcast=True)
        index = (start + e.to(tl.int64)).to(tl.int32)
        place, more = order(((raw & 0x7FFFFFFF) >= t).to(tl.int32), ROWS)
        _deposit(work, cand, t, shift, raw, index, found + place, counted, limit)
        found += more
    return found
