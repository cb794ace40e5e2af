"""The kernels of topk and above on CUDA: few launches, no host sync, exactly k entries in order.

Phase 0: a bound from the group maxima, the groups that reach it, their entries that do (launches of
their own for large vectors, otherwise all phases are one launch).
Phase 1: the coarse bin of the k-th magnitude; its candidates counted by their last bits.
Phase 2: the k-th magnitude exactly; winners to their places, ties to the smaller index.
When fewer than k entries are not zero, phase 2 takes the rest from the zeros. When the candidates
are too few (an unlucky sample) or too many (ties, one scale against another), phases 1 to 8 count
digits over all of u instead, and phase 9 writes.
"""

import triton
import triton.language as tl

from gradwire.kernels.last_selection import COUNTS
from gradwire.kernels.triton.select.bound import aim
from gradwire.kernels.triton.select.exact import count_digits, narrow
from gradwire.kernels.triton.select.prune import prune
from gradwire.kernels.triton.select.strategy import (
    BY_BINS,
    BY_DIGITS,
    WITH_ZEROS,
    choose_way,
    emit_candidates,
    emit_entries,
    fill,
    look,
)
from gradwire.kernels.triton.select.turns import (
    BOUND,
    CLEARED,
    COARSE,
    COARSE_BINS,
    DIGITS,
    FINE,
    PASSES,
    SHIFT,
    WANTED,
    WAY,
    clear,
    finish,
    leave,
    take,
    wait,
)

COUNTED = tl.constexpr(COUNTS)
PHASES = tl.constexpr(10)
SCAN = tl.constexpr(4096)


@triton.jit(do_not_specialize=["n", "rank", "crowd"])
def find_bound(work, maxima, threshold, words, n, rank, crowd, SAMPLE: tl.constexpr):
    """Leaves the bound in the header."""
    t, shift = aim(maxima, None, n, rank, rank, crowd, threshold, None, words, SAMPLE)
    tl.store(work + BOUND, t)
    tl.store(work + SHIFT, shift)


@triton.jit(do_not_specialize=["size", "n", "rank", "loose", "crowd", "share", "room", "spill"])
def prune_parts(
    work, u, maxima, counts, scratch, threshold, scale, words, size, n, rank, loose, crowd, share,
    room, spill,
    PARTS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, THREADS: tl.constexpr,
    WHOLE: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """The candidates of one part: for large vectors, whose many parts hide each other's waits.

    Clears what the launch after it counts in.
    """
    cap = PARTS * room + spill
    cand = (scratch + 2 * PARTS).to(tl.pointer_type(tl.int64))
    ids = scratch + 2 * PARTS + cap + cap
    part = tl.program_id(0)
    if counts is None:
        t = tl.load(work + BOUND)
        shift = tl.load(work + SHIFT)
    else:
        t, shift = aim(None, counts, n, rank, loose, crowd, threshold, scale, words, 0)
        if part == 0:
            tl.store(work + BOUND, t)
            tl.store(work + SHIFT, shift)
    clear(work + DIGITS, CLEARED, part, PARTS, 128)
    clear(work + FINE, 1 << shift, part, PARTS, 128)
    prune(
        work, u, maxima, ids, cand, scratch, size, n, t, shift, share, room, spill,
        part, PARTS, GROUP, ROWS, THREADS, WHOLE, COPIES,
    )  # fmt: skip


@triton.jit
def _first(
    work, u, maxima, counts, scratch, threshold, scale, words, size, n, rank, loose, crowd, share,
    room, spill, item,
    ITEMS: tl.constexpr, GROUP: tl.constexpr, SAMPLE: tl.constexpr, ROWS: tl.constexpr,
    THREADS: tl.constexpr, WHOLE: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Phase 0: both of these in one, for vectors where launches would cost more."""
    clear(work + DIGITS, CLEARED, item, ITEMS, 512)
    t, shift = aim(maxima, counts, n, rank, loose, crowd, threshold, scale, words, SAMPLE)
    clear(work + FINE, 1 << shift, item, ITEMS, 512)
    cap = ITEMS * room + spill
    cand = (scratch + 2 * ITEMS).to(tl.pointer_type(tl.int64))
    ids = scratch + 2 * ITEMS + cap + cap
    prune(
        work, u, maxima, ids, cand, scratch, size, n, t, shift, share, room, spill,
        item, ITEMS, GROUP, ROWS, THREADS, WHOLE, COPIES,
    )  # fmt: skip
    tl.store(work + BOUND, t)
    tl.store(work + SHIFT, shift)


@triton.jit(
    do_not_specialize=[
        "size", "k", "n", "rank", "loose", "crowd", "share", "room", "spill", "wide"
    ]
)  # fmt: skip
def winners(
    work, u_at, maxima_at, counts, scratch_at, threshold, scale, indices, values, count, words,
    size, k, n, rank, loose, crowd, share, room, spill, wide,
    ITEMS: tl.constexpr, LISTS: tl.constexpr, LOOKS: tl.constexpr, GROUP: tl.constexpr,
    SAMPLE: tl.constexpr, ROWS: tl.constexpr, THREADS: tl.constexpr, WHOLE: tl.constexpr,
    BEGIN: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """The phases from BEGIN on."""
    number = take(work)
    busy = number < (PHASES - BEGIN) * ITEMS
    while busy:
        phase = BEGIN + number // ITEMS
        item = number % ITEMS
        zero = (number >> 30) * 64
        if phase > BEGIN:
            zero = wait(work, (tl.minimum(phase, 2) - BEGIN) * ITEMS)
        # Pointers that seem new in every phase: kept for all phases they would fill the registers.
        w = work + zero
        u = u_at + zero
        scratch = scratch_at + zero
        cand = (scratch + 2 * ITEMS * LISTS).to(tl.pointer_type(tl.int64))
        first = item.to(tl.int64) * wide * SCAN
        last = tl.minimum(first + wide.to(tl.int64) * SCAN, size)
        if phase == 0:
            _first(
                w, u, maxima_at + zero, counts, scratch, threshold, scale, words, size + zero,
                n + zero, rank, loose, crowd, share, room, spill, item, ITEMS, GROUP, SAMPLE, ROWS,
                THREADS, WHOLE, COPIES,
            )  # fmt: skip
        else:
            t = look(w + BOUND)
            shift = look(w + SHIFT)
            if phase == 1:
                way, bin = choose_way(w, k, spill, threshold, count, words, item, COPIES)
                if count is not None:
                    fill(indices, values, k, size.to(tl.int32), item, ITEMS)
                if (way == BY_BINS) & (bin >= 0):
                    narrow(w, cand, scratch, item * LISTS, t, shift, bin, LISTS)
            else:
                way = look(w + WAY)
                busy = (way == BY_DIGITS) | (phase == 2)
                if phase == 2:
                    clear(w + COARSE, COPIES * COARSE_BINS, item, ITEMS, 512)
                    if counts is not None:
                        clear(counts, COUNTED, item, ITEMS, 512)
                    if way == BY_BINS:
                        emit_candidates(
                            w, cand, scratch, t, shift, indices, values, words, item, LISTS, LOOKS
                        )
            if way == BY_DIGITS:
                if phase > 2:
                    wait(work, (phase - BEGIN) * ITEMS)
                if phase <= PASSES:
                    count_digits(w, u, first, last, look(w + WANTED), phase - 1, SCAN)
            if ((way == WITH_ZEROS) & (phase == 2)) | ((way == BY_DIGITS) & (phase > PASSES)):
                emit_entries(
                    w, u, first, last, way, indices, values, count, words, item, ITEMS, LOOKS,
                    SCAN // 128,
                )  # fmt: skip
        if busy:
            finish(work)
            number = take(work)
            busy = number < (PHASES - BEGIN) * ITEMS
    leave(work)
