"""Phases 1 to 9: find the k-th magnitude to its last bit, and write the winners in order."""

import triton
import triton.language as tl

from gradwire.kernels.triton.bits import magnitude
from gradwire.kernels.triton.order import order, tile_entries
from gradwire.kernels.triton.select.find import find_bin
from gradwire.kernels.triton.select.turns import DIGITS, FINE, LAST_INDEX, PASSES, look_back


@triton.jit
def lists_of(meta, first, LISTS: tl.constexpr):
    """Return the shape of an item's candidates in tiles of 2048: rounds, bits, widest list.

    A round reads as many lists side by side as fit, each in 2^bits cells of the tile.
    """
    tl.static_assert(LISTS == 1 or LISTS == 8)
    if LISTS == 1:
        return 1, 11, tl.load(meta + 2 * first + 1, cache_modifier=".cg")
    else:
        each = first + tl.arange(0, LISTS)
        widest = tl.max(tl.load(meta + 2 * each + 1, cache_modifier=".cg"), axis=0)
        bits = 8
        while (widest > (1 << bits)) & (bits < 11):
            bits += 1
        return LISTS >> (11 - bits), bits, widest


@triton.jit
def load_candidates(cand, meta, first, e, start, bits):
    """Return for cells `e` of a tile the bits with the sign, the index, and True for a candidate.

    Cell e is entry start + e % 2^bits of list first + e / 2^bits.
    """
    at = 2 * (first + (e >> bits))
    column = start + (e & ((1 << bits) - 1))
    base = tl.load(meta + at, cache_modifier=".cg")
    real = column < tl.load(meta + at + 1, cache_modifier=".cg")
    word = tl.load(cand + base + column, mask=real, other=0, cache_modifier=".cg")
    return (word >> 32).to(tl.int32), word.to(tl.int32), real


@triton.jit
def narrow(work, cand, meta, first, t, shift, bin, LISTS: tl.constexpr):
    """Count the candidates of one coarse bin by their last `shift` bits."""
    rounds, bits, widest = lists_of(meta, first, LISTS)
    side = 2048 >> bits
    e = tl.arange(0, 2048)
    for r in range(rounds):
        for start in range(0, widest, 1 << bits):
            raw, _, real = load_candidates(cand, meta, first + r * side, e, start, bits)
            above = (raw & 0x7FFFFFFF) - t
            low = above & ((1 << shift) - 1)
            ones = tl.full([2048], 1, tl.int32)
            mask = real & ((above >> shift) == bin)
            tl.atomic_add(work + FINE + low, ones, mask=mask, sem="relaxed")


@triton.jit
def _tally(size, edge):
    """Return the number of a tile's entries above the edge, and the number that equal it."""
    packed = (size > edge).to(tl.int32) + ((size == edge).to(tl.int32) << 16)
    packed = tl.sum(tl.sum(tl.sum(packed, axis=2), axis=1), axis=0)
    return packed & 0xFFFF, packed >> 16


@triton.jit
def _write(indices, values, record, raw, index, bits, edge, need, base, ROWS: tl.constexpr):
    """Write one tile's winners to their places from `base` on; return base and need after it.

    Winners are the entries above the edge, and the first `need` that equal it. The edge and the
    index of the last equal winner go to `record`, if there is one.
    """
    chosen = (bits > edge).to(tl.int32)
    tie = (bits == edge).to(tl.int32)
    ties = tl.sum(tl.sum(tl.sum(tie, axis=2), axis=1), axis=0)
    if ties <= need:
        chosen += tie
    elif need > 0:
        rank, _ = order(tie, ROWS)
        chosen += ((tie > 0) & (rank < need)).to(tl.int32)
    if record is not None:
        if (need > 0) & (ties >= need):
            last = tl.where((tie > 0) & (chosen > 0), index, -1)
            tl.store(record, edge)
            tl.store(record + LAST_INDEX, tl.max(tl.max(tl.max(last, axis=2), axis=1), axis=0))
    place, winners = order(chosen, ROWS)
    tl.store(indices + base + place, index, mask=chosen > 0)
    tl.store(values + base + place, raw.to(tl.float32, bitcast=True), mask=chosen > 0)
    return base + winners, tl.maximum(need - ties, 0)


@triton.jit
def _note(record, edge, need, item):
    """Record the edge if no winner equals it."""
    if record is not None:
        if (need == 0) & (item == 0):
            tl.store(record, edge)
            tl.store(record + LAST_INDEX, -1)


@triton.jit
def emit(
    work, cand, meta, first, edge, need, indices, values, record, item,
    LISTS: tl.constexpr, LOOKS: tl.constexpr,
):  # fmt: skip
    """Write this item's winners among its candidates."""
    rounds, bits, widest = lists_of(meta, first, LISTS)
    _note(record, edge, need, item)
    e = tile_entries(16, need)
    side = 2048 >> bits
    # The first tile, which is mostly the only one, stays in registers for both passes.
    raw, index, real = load_candidates(cand, meta, first, e, 0, bits)
    size = tl.where(real, raw & 0x7FFFFFFF, -1)
    more, ties = _tally(size, edge)
    for r in range(rounds):
        for start in range(tl.where(r == 0, 1 << bits, 0), widest, 1 << bits):
            more_raw, _, candidate = load_candidates(cand, meta, first + r * side, e, start, bits)
            a, b = _tally(tl.where(candidate, more_raw & 0x7FFFFFFF, -1), edge)
            more += a
            ties += b
    more, ties = look_back(work, item, more, ties, LOOKS)
    base = more + tl.minimum(ties, need)
    left = tl.maximum(need - ties, 0)
    base, left = _write(indices, values, record, raw, index, size, edge, left, base, 16)
    for r in range(rounds):
        for start in range(tl.where(r == 0, 1 << bits, 0), widest, 1 << bits):
            raw, index, real = load_candidates(cand, meta, first + r * side, e, start, bits)
            size = tl.where(real, raw & 0x7FFFFFFF, -1)
            base, left = _write(indices, values, record, raw, index, size, edge, left, base, 16)


# --- the slower path, for data that defeats the bound: four bits per pass over all of u ---


@triton.jit
def edge_of(work, k, passes):
    """Return the leading bits of the k-th magnitude after `passes`, and its rank among equals."""
    prefix = passes * 0
    for p in range(passes):
        digit, above = find_bin(work + DIGITS + p * 16, 16, k, 4)
        prefix = (prefix << 4) + digit
        k -= above
    return prefix, k


@triton.jit
def _collect(bins, counts, HIGH: tl.constexpr):
    """Add the eight byte-wide counters of every thread to their bins."""
    for f in tl.static_range(8):
        tl.atomic_add(bins + HIGH + f, tl.sum(((counts >> (8 * f)) & 255).to(tl.int32)))


@triton.jit
def count_digits(work, u, first, last, k, p, TILE: tl.constexpr):
    """Count the p-th digit of every entry that begins as the k-th does; 4 bytes per entry."""
    prefix, _ = edge_of(work, k, p)
    shift = 4 * (PASSES - 1 - p)
    i = tl.arange(0, TILE)
    for begin in range(first, last, 255 * TILE):
        # Each word holds eight counters of a byte, which can count 255 tiles.
        low = tl.zeros([TILE], tl.int64)
        high = tl.zeros([TILE], tl.int64)
        end = tl.minimum(begin + 255 * TILE, last)
        for start in range(begin, end, TILE):
            inside = i < end - start
            bits = magnitude(tl.load(u + start + i, mask=inside, other=0))
            digit = (bits >> shift) & 15
            same = inside & ((bits >> shift >> 4) == prefix)
            unit = same.to(tl.int64) << ((digit & 7) * 8).to(tl.int64)
            low += tl.where(digit < 8, unit, 0)
            high += tl.where(digit < 8, 0, unit)
        _collect(work + DIGITS + p * 16, low, 0)
        _collect(work + DIGITS + p * 16, high, 8)


@triton.jit
def emit_all(
    work, u, first, last, edge, need, indices, values, record, item,
    LOOKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write this item's winners among all entries in [first, last); return the end of its output.

    Moves 8 bytes per entry.
    """
    TILE: tl.constexpr = 128 * ROWS
    _note(record, edge, need, item)
    more = 0
    ties = 0
    i = tl.arange(0, TILE)
    for start in range(first, last, TILE):
        inside = i < last - start
        bits = tl.where(inside, magnitude(tl.load(u + start + i, mask=inside, other=0)), -1)
        more += tl.sum((bits > edge).to(tl.int32))
        ties += tl.sum((bits == edge).to(tl.int32))
    more, ties = look_back(work, item, more, ties, LOOKS)
    base = more + tl.minimum(ties, need)
    left = tl.maximum(need - ties, 0)
    e = tile_entries(ROWS, need)
    for start in range(first, last, TILE):
        inside = e < last - start
        raw = tl.load(u + start + e, mask=inside, other=0).to(tl.float32).to(tl.int32, bitcast=True)
        bits = tl.where(inside, raw & 0x7FFFFFFF, -1)
        index = (start + e.to(tl.int64)).to(tl.int32)
        base, left = _write(indices, values, record, raw, index, bits, edge, left, base, ROWS)
    return base
