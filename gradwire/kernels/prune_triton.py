"""Phase one of topk: a bound from a sample, and every entry that reaches it.

The k-th largest group maximum is never above the k-th largest magnitude, so a group whose maximum
is below it cannot hold a winner. A sample of the maxima gives a bound a little lower; the number of
entries that reach it says whether it was low enough.
"""

import triton
import triton.language as tl

from gradwire.kernels.order_triton import cells, order
from gradwire.kernels.scan_triton import INFINITY, magnitude
from gradwire.kernels.turns_triton import COARSE, COARSE_BINS, FINE_BITS, SPILLED, TOTAL, striped

SECTOR = tl.constexpr(8)
# Of 45 selections of a ResNet-50 in training 7 took the slower path with it, 22 without.
LOWERED = tl.constexpr(0.85)


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

    Looks no further than 16 powers of two below the largest. Reads 4 * SAMPLE bytes.
    """
    bits = _sample(values, n, SAMPLE // SECTOR)
    largest = tl.max(tl.max(bits, axis=1), axis=0)
    lowest = tl.maximum((largest >> 15 << 15) - (4095 << 15), 0)
    t = lowest
    count = tl.minimum(n, SAMPLE)
    for step in range(6):
        # Three counts in one sum, ten bits each in a sector, twenty in all: two bits of t a round.
        one = 1 << (25 - 2 * step)
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
    # Too few lie as high as that: then it is everything but zeros that is looked for.
    return tl.where(t == lowest, 0, t), count, largest


@triton.jit
def aim(values, n, rank, crowd, words, SAMPLE: tl.constexpr):
    """The bound, at least 1, or 0 where none helps; and the width of a coarse bin, in bits."""
    t, seen, largest = bound(values, n, rank, SAMPLE)
    # Where the sample is full of ties so is the rest: everything would be a candidate.
    helps = (crowd >= 0) & ((seen <= crowd) | (t == 0))
    shift = 10
    if words is not None:
        # Where that says little the last edge may say more, and then bins reach to four times it.
        least = lowered(words)
        shift = tl.where(least > t, 13, 10)
        t = tl.maximum(t, least)
    # Bins just wide enough to reach from the bound to the largest of the sample.
    while ((largest - t) >> shift >= COARSE_BINS - 1) & (shift < FINE_BITS):
        shift += 1
    return tl.where(helps, tl.maximum(t, 1), 0), shift


@triton.jit
def lowered(words):
    """The edge of the last selection, a little lowered, as bits, if that one was crowded; else 0.

    Where large entries lie together, as those of a small layer do among larger ones, few maxima
    stand for many winners: the bound from maxima then lets far too much pass.
    """
    edge = tl.load(words).to(tl.float32, bitcast=True) * LOWERED
    return tl.where(tl.load(words + 2) != 0, edge.to(tl.int32, bitcast=True), 0)


@triton.jit
def aim_at(values, n, rank, crowd, threshold, words, SAMPLE: tl.constexpr):
    """The same; where there is a threshold, never below what passes it."""
    t, shift = aim(values, n, rank, crowd, words, SAMPLE)
    if threshold is not None:
        t = tl.maximum(t, least_of(threshold))
    return t, shift


@triton.jit
def least_of(threshold):
    """The smallest magnitude, as bits, that passes a threshold; 0 where even zeros do."""
    bits = tl.load(threshold).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # -0 is no less than 0. Nothing passes a NaN, whatever its bits.
    least = tl.where((bits < 0) & (bits != -2147483648), 0, size + 1)
    return tl.where(size > INFINITY, INFINITY + 1, least)


@triton.jit
def marks(values, first, named, last, t, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Which of the WIDTH entries from each `first` on reach t, as the bits of a word.

    A row belongs to one thread, which reads it four entries at a time: nothing is passed around.
    MASKED: entries from `last` on are none.
    """
    four = tl.arange(0, 4)[None, :]
    word = first * 0
    for j in tl.static_range(0, WIDTH, 4):
        at = first[:, None] + (four + j)
        inside = named[:, None]
        if MASKED:
            inside &= at < last
        reach = (magnitude(tl.load(values + at, mask=inside, other=0)) >= t) & inside
        word += tl.sum(reach.to(tl.int32) << (four + j), axis=1)
    return word


@triton.jit
def _ones(word):
    """How many bits of a word are set."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return ((((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24) & 255


@triton.jit
def _lowest(word):
    """A word's lowest bit, and its number."""
    bit = word & -word
    power = bit.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    return bit, ((power >> 23) & 255) - 127


@triton.jit
def compact(maxima, ids, first, last, t, ROWS: tl.constexpr):
    """How many groups in [first, last) reach t; their ids, ascending, go to `ids`.

    Moves 4 bytes a group.
    """
    WIDTH: tl.constexpr = 8
    found = 0
    row = tl.arange(0, ROWS) * WIDTH
    for start in range(first, last, ROWS * WIDTH):
        if start + ROWS * WIDTH <= last:
            word = marks(maxima, start + row, row >= 0, last, t, WIDTH, False)
        else:
            word = marks(maxima, start + row, row >= 0, last, t, WIDTH, True)
        each = _ones(word)
        place = found + tl.cumsum(each, axis=0) - each
        for _ in range(tl.max(each, axis=0)):
            bit, number = _lowest(word)
            tl.store(ids + place, start + row + number, mask=word != 0)
            word ^= bit
            place += 1
        found += tl.sum(each)
    return found


@triton.jit
def _deposit(bins, cand, t, shift, raw, index, place, counted, limit):
    """Candidates with place < limit go to memory; those from `counted` on also into the bins."""
    bits = raw & 0x7FFFFFFF
    fits = (bits >= t) & (place < limit)
    tl.store(cand + place, (raw.to(tl.int64) << 32) | index.to(tl.int64), mask=fits)
    bin = tl.minimum((bits - t) >> shift, COARSE_BINS - 1)
    ones = tl.full(bin.shape, 1, tl.int32)
    tl.atomic_add(bins + striped(bin), ones, mask=fits & (place >= counted), sem="relaxed")


@triton.jit
def gather(
    bins, u, size, ids, groups, t, shift, cand, counted, limit,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """How many entries of the named groups reach t; the first `limit` of them are kept.

    Nearly every such group holds one such entry: the first of each is taken from all groups at
    once, then the second. WHOLE: size is a multiple of GROUP. Moves 4 * GROUP bytes a group and 8 a
    candidate.
    """
    WIDTH: tl.constexpr = GROUP if GROUP < 32 else 32
    SPLIT: tl.constexpr = GROUP // WIDTH
    found = 0
    row = tl.arange(0, ROWS)
    for start in range(0, groups * SPLIT, ROWS):
        r = start + row
        named = r < groups * SPLIT
        # The last group's entries may lie past the end, but not past 2^31 - 1.
        first = tl.load(ids + r // SPLIT, mask=named, other=0) * GROUP + r % SPLIT * WIDTH
        word = marks(u, first, named, size, t, WIDTH, not WHOLE)
        each = _ones(word)
        place = found + tl.cumsum(each, axis=0) - each
        for _ in range(tl.max(each, axis=0)):
            bit, number = _lowest(word)
            index = first + number
            # Read again, from the nearest cache: cheaper than keeping the row.
            value = tl.load(u + index, mask=word != 0, other=0).to(tl.float32)
            raw = value.to(tl.int32, bitcast=True)
            _deposit(bins, cand, t, shift, raw, index, place, counted, limit)
            word ^= bit
            place += 1
        found += tl.sum(each)
    return found


@triton.jit
def gather_all(bins, u, first, last, t, shift, cand, counted, limit, ROWS: tl.constexpr):
    """The same for every entry in [first, last): where groups would rule out too little."""
    found = 0
    e = cells(ROWS, shift)
    for start in range(first, last, 128 * ROWS):
        x = tl.load(u + start + e, mask=e < last - start, other=0).to(tl.float32)
        raw = x.to(tl.int32, bitcast=True)
        index = (start + e.to(tl.int64)).to(tl.int32)
        place, more = order(((raw & 0x7FFFFFFF) >= t).to(tl.int32), ROWS)
        _deposit(bins, cand, t, shift, raw, index, found + place, counted, limit)
        found += more
    return found


@triton.jit
def prune(
    work, u, maxima, ids, cand, meta, size, n, t, shift, share, room, spill, part,
    PARTS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, THREADS: tl.constexpr,
    WHOLE: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """One part's candidates, into its own room or, when that is full, the common spill."""
    found = 0
    base = part * room
    bins = work + COARSE + part % COPIES * COARSE_BINS
    if t > 0:
        first = part.to(tl.int64) * share * ROWS * 128
        last = tl.minimum(first + share.to(tl.int64) * ROWS * 128, n)
        groups = 0
        if GROUP > 1:
            groups = compact(maxima, ids + first, first.to(tl.int32), last.to(tl.int32), t, THREADS)
            tl.debug_barrier()
        counted = 0
        limit = room
        again = 1
        while again > 0:
            if GROUP > 1:
                found = gather(
                    bins, u, size, ids + first, groups, t, shift, cand + base, counted, limit,
                    GROUP, THREADS, WHOLE,
                )  # fmt: skip
            else:
                found = gather_all(
                    bins, u, first, last, t, shift, cand + base, counted, limit, ROWS
                )
            again = 0
            if (found > limit) & (limit == room):
                start = tl.atomic_add(work + SPILLED, found, sem="relaxed")
                if start + found <= spill:
                    base = PARTS * room + start
                    counted = room
                    limit = found
                    again = 1
        tl.atomic_add(work + TOTAL, found, sem="relaxed")
    tl.store(meta + 2 * part, base)
    tl.store(meta + 2 * part + 1, found)
