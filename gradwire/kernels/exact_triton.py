"""Phases two and three of topk: the k-th magnitude to its last bit, and the entries in order."""

import triton
import triton.language as tl

from gradwire.kernels.order_triton import cells, order
from gradwire.kernels.scan_triton import magnitude
from gradwire.kernels.turns_triton import DIGITS, FINE, PASSES, look_back


@triton.jit
def find(bins, count, k, CHUNK: tl.constexpr):
    """The bin, of `count`, that holds the k-th largest, and how many are in those above it."""
    hit = tl.zeros([], tl.int64)
    over = 0
    i = tl.arange(0, CHUNK)
    start = count
    while start > 0:
        start -= CHUNK
        counts = tl.load(bins + start + i, cache_modifier=".cg")
        reach = over + tl.cumsum(counts, axis=0, reverse=True)
        here = (reach >= k) & (reach - counts < k)
        both = ((start + i).to(tl.int64) << 32) + (reach - counts).to(tl.int64)
        hit += tl.sum(tl.where(here, both, 0))
        over = tl.max(reach, axis=0)
    return (hit >> 32).to(tl.int32), hit.to(tl.int32)


@triton.jit
def candidates(cand, i, count):
    """Bits (with the sign) and index of the i-th candidates; 0 past the end."""
    word = tl.load(cand + i, mask=i < count, other=0, cache_modifier=".cg")
    return (word >> 32).to(tl.int32), word.to(tl.int32)


@triton.jit
def narrow(work, cand, count, t, shift, bin, TILE: tl.constexpr):
    """Counts the candidates of one coarse bin by their last `shift` bits."""
    for start in range(0, count, TILE):
        i = start + tl.arange(0, TILE)
        raw, _ = candidates(cand, i, count)
        bits = (raw & 0x7FFFFFFF) - t
        here = (i < count) & ((bits >> shift) == bin)
        low = bits & ((1 << shift) - 1)
        ones = tl.full([TILE], 1, tl.int32)
        tl.atomic_add(work + FINE + low, ones, mask=here, sem="relaxed")


@triton.jit
def _write(indices, values, raw, index, bits, edge, need, base, ROWS: tl.constexpr):
    """Puts one tile's winners in their places from `base` on; returns base and need after it.

    Winners are the entries above the edge, and the first `need` that equal it.
    """
    chosen = (bits > edge).to(tl.int32)
    tie = (bits == edge).to(tl.int32)
    ties = tl.sum(tl.sum(tl.sum(tie, axis=2), axis=1), axis=0)
    if ties <= need:
        chosen += tie
    elif need > 0:
        rank, _ = order(tie, ROWS)
        chosen += ((tie > 0) & (rank < need)).to(tl.int32)
    place, found = order(chosen, ROWS)
    tl.store(indices + base + place, index, mask=chosen > 0)
    tl.store(values + base + place, raw.to(tl.float32, bitcast=True), mask=chosen > 0)
    return base + found, tl.maximum(need - ties, 0)


@triton.jit
def emit(
    work, cand, count, edge, need, indices, values, item,
    ITEMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes this item's winners among its candidates."""
    TILE: tl.constexpr = 128 * ROWS
    more = 0
    ties = 0
    for start in range(0, count, TILE):
        i = start + tl.arange(0, TILE)
        raw, _ = candidates(cand, i, count)
        bits = tl.where(i < count, raw & 0x7FFFFFFF, -1)
        more += tl.sum((bits > edge).to(tl.int32))
        ties += tl.sum((bits == edge).to(tl.int32))
    more, ties = look_back(work, item, more, ties, ITEMS)
    base = more + tl.minimum(ties, need)
    left = tl.maximum(need - ties, 0)
    e = cells(ROWS, count)
    for start in range(0, count, TILE):
        raw, index = candidates(cand, start + e, count)
        bits = tl.where(start + e < count, raw & 0x7FFFFFFF, -1)
        base, left = _write(indices, values, raw, index, bits, edge, left, base, ROWS)


# --- the slower path, for data that defeats the bound: four bits a pass over all of u ---


@triton.jit
def edge_of(work, k, passes):
    """The leading bits of the k-th magnitude after that many passes, and what k is among them."""
    prefix = passes * 0
    for p in range(passes):
        digit, above = find(work + DIGITS + p * 16, 16, k, 16)
        prefix = (prefix << 4) + digit
        k -= above
    return prefix, k


@triton.jit
def _tally(bins, counts, HIGH: tl.constexpr):
    """Adds the eight byte-wide counters of every thread to their bins."""
    for f in tl.static_range(8):
        tl.atomic_add(bins + HIGH + f, tl.sum(((counts >> (8 * f)) & 255).to(tl.int32)))


@triton.jit
def count_digits(work, u, first, last, k, p, TILE: tl.constexpr):
    """Counts the p-th digit of every entry that begins as the k-th does. Moves 4 bytes an entry."""
    prefix, _ = edge_of(work, k, p)
    shift = 4 * (PASSES - 1 - p)
    i = tl.arange(0, TILE)
    for begin in range(first, last, 255 * TILE):
        # Eight counters of a byte in each word: good for 255 tiles.
        low = tl.zeros([TILE], tl.int64)
        high = tl.zeros([TILE], tl.int64)
        end = tl.minimum(begin + 255 * TILE, last)
        for start in range(begin, end, TILE):
            inside = i < end - start
            bits = magnitude(tl.load(u + start + i, mask=inside, other=0))
            digit = (bits >> shift) & 15
            same = inside & ((bits >> shift >> 4) == prefix)
            one = same.to(tl.int64) << ((digit & 7) * 8).to(tl.int64)
            low += tl.where(digit < 8, one, 0)
            high += tl.where(digit < 8, 0, one)
        _tally(work + DIGITS + p * 16, low, 0)
        _tally(work + DIGITS + p * 16, high, 8)


@triton.jit
def emit_all(
    work, u, first, last, edge, need, indices, values, item,
    ITEMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes this item's winners among all entries in [first, last). Moves 8 bytes an entry."""
    TILE: tl.constexpr = 128 * ROWS
    more = 0
    ties = 0
    i = tl.arange(0, TILE)
    for start in range(first, last, TILE):
        inside = i < last - start
        bits = tl.where(inside, magnitude(tl.load(u + start + i, mask=inside, other=0)), -1)
        more += tl.sum((bits > edge).to(tl.int32))
        ties += tl.sum((bits == edge).to(tl.int32))
    more, ties = look_back(work, item, more, ties, ITEMS)
    base = more + tl.minimum(ties, need)
    left = tl.maximum(need - ties, 0)
    e = cells(ROWS, need)
    for start in range(first, last, TILE):
        inside = e < last - start
        raw = tl.load(u + start + e, mask=inside, other=0).to(tl.float32).to(tl.int32, bitcast=True)
        bits = tl.where(inside, raw & 0x7FFFFFFF, -1)
        index = (start + e.to(tl.int64)).to(tl.int32)
        base, left = _write(indices, values, raw, index, bits, edge, left, base, ROWS)
