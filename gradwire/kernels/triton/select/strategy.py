"""Choose on the device, in phase 1, how the winners are taken from the candidates."""

import triton
import triton.language as tl

from gradwire.kernels.triton.bits import load_shared
from gradwire.kernels.triton.select.bound import least_of
from gradwire.kernels.triton.select.exact import edge_of, emit, emit_all
from gradwire.kernels.triton.select.find import find_bin, find_coarse_bin
from gradwire.kernels.triton.select.turns import (
    ABOVE,
    BIN,
    BOUND,
    COARSE_BINS,
    CROWDED,
    FINE,
    LEAST,
    PASSES,
    SPILLED,
    STRATEGY,
    TOTAL,
    WANTED,
)

# By the digits of all entries, by the bins of the candidates, or all candidates and some zeros.
BY_DIGITS = tl.constexpr(0)
BY_BINS = tl.constexpr(1)
WITH_ZEROS = tl.constexpr(2)


@triton.jit
def choose_strategy(work, k, spill, threshold, count, record, item, COPIES: tl.constexpr):
    """Return the strategy, and the coarse bin of the k-th magnitude.

    Item 0 stores both for later phases. With a threshold, at most the entries that pass are wanted.
    If the bound is the threshold's own, the candidates are exactly the entries that pass. All of
    them win if there is room.
    """
    t = load_shared(work + BOUND)
    total = load_shared(work + TOTAL)
    fits = load_shared(work + SPILLED) <= spill
    least = 0
    if threshold is not None:
        least = least_of(threshold)
        if (t == least) & (t > 0):
            k = tl.minimum(k, total)
    bin, above = find_coarse_bin(work, k, COPIES)
    good = fits & (total >= k) & (bin < COARSE_BINS - 1)
    strategy = tl.where(good, BY_BINS, BY_DIGITS)
    if threshold is None:
        strategy = tl.where(fits & (total < k) & (t == 1), WITH_ZEROS, strategy)
    else:
        all = fits & (total == k) & (t == least)
        strategy = tl.where(all, BY_BINS, strategy)
        bin = tl.where(all, -1, bin)
    if item == 0:
        tl.store(work + STRATEGY, strategy)
        tl.store(work + BIN, bin)
        tl.store(work + ABOVE, above)
        tl.store(work + WANTED, k)
        tl.store(work + LEAST, least)
        if record is not None:
            # Crowded until the lowered threshold is too high. Then the sample has its turn again.
            crowded = (total - k > k) | ((tl.load(record + CROWDED) != 0) & (total >= k))
            tl.store(record + CROWDED, crowded.to(tl.int32))
        if threshold is not None:
            tl.store(count, k)
    return strategy, bin


@triton.jit
def emit_candidates(
    work, cand, meta, t, shift, indices, values, record, item,
    LISTS: tl.constexpr, LOOKS: tl.constexpr,
):  # fmt: skip
    """Find the k-th magnitude, and write this item's winners among its candidates."""
    bin = load_shared(work + BIN)
    edge = t - 1
    need = bin * 0
    if bin >= 0:
        k = load_shared(work + WANTED)
        above = load_shared(work + ABOVE)
        low, more = find_bin(work + FINE, 1 << shift, k - above, 64)
        edge = t + (bin << shift) + low
        need = k - above - more
    emit(work, cand, meta, item * LISTS, edge, need, indices, values, record, item, LISTS, LOOKS)


@triton.jit
def emit_entries(
    work, u, first, last, strategy, indices, values, count, record, item,
    ITEMS: tl.constexpr, LOOKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the winners among all of this item's entries, if the candidates do not suffice."""
    k = load_shared(work + WANTED)
    edge, need = edge_of(work, k, PASSES)
    if strategy == WITH_ZEROS:
        edge = 0
        need = k - load_shared(work + TOTAL)
    if count is not None:
        least = load_shared(work + LEAST)
        if edge < least:
            edge = least - 1
            need = 0
    end = emit_all(work, u, first, last, edge, need, indices, values, record, item, LOOKS, ROWS)
    if count is not None:
        if item == ITEMS - 1:
            tl.store(count, end)


@triton.jit
def fill_padding(indices, values, room, size, item, items):
    """Fill this item's share of the output as if nothing were chosen: index `size`, value zero."""
    share = tl.cdiv(room, items)
    for start in range(0, share, 1024):
        i = start + tl.arange(0, 1024)
        place = item * share + i
        mask = (i < share) & (place < room)
        tl.store(indices + place, tl.zeros([1024], tl.int32) + size, mask=mask)
        tl.store(values + place, tl.zeros([1024], tl.float32), mask=mask)
