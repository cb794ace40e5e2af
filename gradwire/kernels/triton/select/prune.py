"""Phase 0: find every entry that reaches the bound."""

import triton
import triton.language as tl

from gradwire.kernels.triton.bits import bits_of
from gradwire.kernels.triton.order import order, tile_entries
from gradwire.kernels.triton.select.turns import COARSE, COARSE_BINS, SPILLED, TOTAL, striped


@triton.jit
def bitmask_of(values, first, named, last, t, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Return a word per row whose bit i is set if the i-th of WIDTH entries from `first` reaches t.

    A row belongs to one thread, which reads 16 bytes at a time, so threads exchange nothing.
    MASKED: entries from `last` on have no bit.
    """
    SOME: tl.constexpr = 128 // values.dtype.element_ty.primitive_bitwidth
    some = tl.arange(0, SOME)[None, :]
    word = first * 0
    for j in tl.static_range(0, WIDTH, SOME):
        at = first[:, None] + (some + j)
        inside = named[:, None]
        if MASKED:
            inside &= at < last
        reach = (bits_of(tl.load(values + at, mask=inside, other=0)) >= t) & inside
        word += tl.sum(reach.to(tl.int32) << (some + j), axis=1)
    return word


@triton.jit
def _ones(word):
    """Count the set bits of a word."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return ((((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24) & 255


@triton.jit
def _lowest(word):
    """Return a word's lowest set bit, and the bit's number."""
    bit = word & -word
    power = bit.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    return bit, ((power >> 23) & 255) - 127


@triton.jit
def compact(maxima, ids, first, last, t, ROWS: tl.constexpr):
    """Count the blocks in [first, last) that reach t; store their ids, ascending, in `ids`.

    Moves 2 or 4 bytes per block, and 4 per block that reaches t.
    """
    CODES: tl.constexpr = maxima.dtype.element_ty == tl.int16
    WIDTH: tl.constexpr = 16 if CODES else 8
    if CODES:
        t = t >> 15 << 15
    reaching = 0
    row = tl.arange(0, ROWS) * WIDTH
    for start in range(first, last, ROWS * WIDTH):
        if start + ROWS * WIDTH <= last:
            word = bitmask_of(maxima, start + row, row >= 0, last, t, WIDTH, False)
        else:
            word = bitmask_of(maxima, start + row, row >= 0, last, t, WIDTH, True)
        each = _ones(word)
        place = reaching + tl.cumsum(each, axis=0) - each
        for _ in range(tl.max(each, axis=0)):
            bit, number = _lowest(word)
            tl.store(ids + place, start + row + number, mask=word != 0)
            word ^= bit
            place += 1
        reaching += tl.sum(each)
    return reaching


@triton.jit
def _deposit(bins, cand, t, shift, raw, index, place, counted, limit):
    """Store candidates with place < limit; those from `counted` on also count in the bins."""
    bits = raw & 0x7FFFFFFF
    fits = (bits >= t) & (place < limit)
    tl.store(cand + place, (raw.to(tl.int64) << 32) | index.to(tl.int64), mask=fits)
    bin = tl.minimum((bits - t) >> shift, COARSE_BINS - 1)
    ones = tl.full(bin.shape, 1, tl.int32)
    tl.atomic_add(bins + striped(bin), ones, mask=fits & (place >= counted), sem="relaxed")


@triton.jit
def gather(
    bins, u, size, ids, blocks, t, shift, cand, counted, limit,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Count the entries of the named blocks that reach t, and keep the first `limit` of them.

    Nearly every such block holds one such entry. The first of each is therefore taken from all
    blocks at once, then the second. WHOLE: size is a multiple of BLOCK. Moves 4 * BLOCK bytes per
    block and 8 per candidate.
    """
    WIDTH: tl.constexpr = BLOCK if BLOCK < 32 else 32
    SPLIT: tl.constexpr = BLOCK // WIDTH
    reaching = 0
    row = tl.arange(0, ROWS)
    for start in range(0, blocks * SPLIT, ROWS):
        r = start + row
        named = r < blocks * SPLIT
        # The last block's entries may lie past the end, but not past 2^31 - 1.
        first = tl.load(ids + r // SPLIT, mask=named, other=0) * BLOCK + r % SPLIT * WIDTH
        word = bitmask_of(u, first, named, size, t, WIDTH, not WHOLE)
        each = _ones(word)
        place = reaching + tl.cumsum(each, axis=0) - each
        for _ in range(tl.max(each, axis=0)):
            bit, number = _lowest(word)
            index = first + number
            # A second read, from the nearest cache, is cheaper than keeping the row.
            value = tl.load(u + index, mask=word != 0, other=0).to(tl.float32)
            raw = value.to(tl.int32, bitcast=True)
            _deposit(bins, cand, t, shift, raw, index, place, counted, limit)
            word ^= bit
            place += 1
        reaching += tl.sum(each)
    return reaching


@triton.jit
def gather_all(bins, u, first, last, t, shift, cand, counted, limit, ROWS: tl.constexpr):
    """Count and keep entries as `gather` does, for every entry in [first, last).

    Used if blocks would rule out too little.
    """
    reaching = 0
    e = tile_entries(ROWS, shift)
    for start in range(first, last, 128 * ROWS):
        x = tl.load(u + start + e, mask=e < last - start, other=0).to(tl.float32)
        raw = x.to(tl.int32, bitcast=True)
        index = (start + e.to(tl.int64)).to(tl.int32)
        place, more = order(((raw & 0x7FFFFFFF) >= t).to(tl.int32), ROWS)
        _deposit(bins, cand, t, shift, raw, index, reaching + place, counted, limit)
        reaching += more
    return reaching


@triton.jit
def prune(
    work, u, maxima, ids, cand, meta, size, n, t, shift, share, room, spill, part,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, THREADS: tl.constexpr,
    WHOLE: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Store one part's candidates in its own room or, when that is full, in the common spill."""
    reaching = 0
    base = part * room
    bins = work + COARSE + part % COPIES * COARSE_BINS
    if t > 0:
        first = part.to(tl.int64) * share * ROWS * 128
        last = tl.minimum(first + share.to(tl.int64) * ROWS * 128, n)
        blocks = 0
        if BLOCK > 1:
            blocks = compact(maxima, ids + first, first.to(tl.int32), last.to(tl.int32), t, THREADS)
            tl.debug_barrier()
        counted = 0
        limit = room
        again = 1
        while again > 0:
            if BLOCK > 1:
                reaching = gather(
                    bins, u, size, ids + first, blocks, t, shift, cand + base, counted, limit,
                    BLOCK, THREADS, WHOLE,
                )  # fmt: skip
            else:
                reaching = gather_all(
                    bins, u, first, last, t, shift, cand + base, counted, limit, ROWS
                )
            again = 0
            if (reaching > limit) & (limit == room):
                start = tl.atomic_add(work + SPILLED, reaching, sem="relaxed")
                if start + reaching <= spill:
                    base = PARTS * room + start
                    counted = room
                    limit = reaching
                    again = 1
        tl.atomic_add(work + TOTAL, reaching, sem="relaxed")
    tl.store(meta + 2 * part, base)
    tl.store(meta + 2 * part + 1, reaching)
