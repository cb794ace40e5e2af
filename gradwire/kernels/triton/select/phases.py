"""The kernels of the selection: `winners`, and two for phase 0 of a large vector before it.

README.md tells the phases.
"""

import triton
import triton.language as tl

from gradwire.kernels.last_selection import COUNTS
from gradwire.kernels.triton.bits import load_shared
from gradwire.kernels.triton.select.bound import find_bound
from gradwire.kernels.triton.select.exact import count_digits, narrow
from gradwire.kernels.triton.select.prune import prune
from gradwire.kernels.triton.select.strategy import (
    BY_BINS,
    BY_DIGITS,
    WITH_ZEROS,
    choose_strategy,
    emit_candidates,
    emit_entries,
    fill_padding,
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
    STRATEGY,
    WANTED,
    clear_words,
    finish_item,
    next_ticket,
    reset_counters,
    wait_for_items,
)

COUNTED = tl.constexpr(COUNTS)
PHASES = tl.constexpr(10)
SCAN = tl.constexpr(4096)


@triton.jit(do_not_specialize=["n", "rank", "crowd"])
def store_bound(work, maxima, threshold, record, n, rank, crowd, SAMPLE: tl.constexpr):
    """Store the bound in the header: phase 0 of a large vector."""
    t, shift = find_bound(maxima, None, n, rank, crowd, threshold, record, SAMPLE)
    tl.store(work + BOUND, t)
    tl.store(work + SHIFT, shift)


@triton.jit(do_not_specialize=["size", "n", "rank", "crowd", "share", "room", "spill"])
def prune_parts(
    work, u, maxima, counts, scratch, threshold, record, size, n, rank, crowd, share,
    room, spill,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, THREADS: tl.constexpr,
    WHOLE: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Find the candidates of one part: phase 0 of a large vector.

    Many parts hide each other's waits for memory. The words in which `winners` counts are cleared.
    """
    cap = PARTS * room + spill
    cand = (scratch + 2 * PARTS).to(tl.pointer_type(tl.int64))
    ids = scratch + 2 * PARTS + cap + cap
    part = tl.program_id(0)
    if counts is None:
        t = tl.load(work + BOUND)
        shift = tl.load(work + SHIFT)
    else:
        t, shift = find_bound(None, counts, n, rank, crowd, threshold, record, 0)
        if part == 0:
            tl.store(work + BOUND, t)
            tl.store(work + SHIFT, shift)
    clear_words(work + DIGITS, CLEARED, part, PARTS, 128)
    clear_words(work + FINE, 1 << shift, part, PARTS, 128)
    prune(
        work, u, maxima, ids, cand, scratch, size, n, t, shift, share, room, spill,
        part, PARTS, BLOCK, ROWS, THREADS, WHOLE, COPIES,
    )  # fmt: skip


@triton.jit
def _phase_zero(
    work, u, maxima, counts, scratch, threshold, record, size, n, rank, crowd, share,
    room, spill, item,
    ITEMS: tl.constexpr, BLOCK: tl.constexpr, SAMPLE: tl.constexpr, ROWS: tl.constexpr,
    THREADS: tl.constexpr, WHOLE: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Find the bound and one item's candidates: phase 0 inside `winners`."""
    clear_words(work + DIGITS, CLEARED, item, ITEMS, 512)
    t, shift = find_bound(maxima, counts, n, rank, crowd, threshold, record, SAMPLE)
    clear_words(work + FINE, 1 << shift, item, ITEMS, 512)
    cap = ITEMS * room + spill
    cand = (scratch + 2 * ITEMS).to(tl.pointer_type(tl.int64))
    ids = scratch + 2 * ITEMS + cap + cap
    prune(
        work, u, maxima, ids, cand, scratch, size, n, t, shift, share, room, spill,
        item, ITEMS, BLOCK, ROWS, THREADS, WHOLE, COPIES,
    )  # fmt: skip
    tl.store(work + BOUND, t)
    tl.store(work + SHIFT, shift)


@triton.jit(
    do_not_specialize=[
        "size", "k", "n", "rank", "crowd", "share", "room", "spill", "wide"
    ]
)  # fmt: skip
def winners(
    work, u_at, maxima_at, counts, scratch_at, threshold, indices, values, count, record,
    size, k, n, rank, crowd, share, room, spill, wide,
    ITEMS: tl.constexpr, LISTS: tl.constexpr, LOOKS: tl.constexpr, BLOCK: tl.constexpr,
    SAMPLE: tl.constexpr, ROWS: tl.constexpr, THREADS: tl.constexpr, WHOLE: tl.constexpr,
    BEGIN: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Do the phases from BEGIN on.

    Phase 0 is `_phase_zero`. The strategy chooses among the other phases.
    """
    number = next_ticket(work)
    busy = number < (PHASES - BEGIN) * ITEMS
    while busy:
        phase = BEGIN + number // ITEMS
        item = number % ITEMS
        zero = (number >> 30) * 64
        if phase > BEGIN:
            zero = wait_for_items(work, (tl.minimum(phase, 2) - BEGIN) * ITEMS)
        # The compiler takes these pointers for new in every phase. Kept for all phases they would
        # fill the registers.
        w = work + zero
        u = u_at + zero
        scratch = scratch_at + zero
        cand = (scratch + 2 * ITEMS * LISTS).to(tl.pointer_type(tl.int64))
        first = item.to(tl.int64) * wide * SCAN
        last = tl.minimum(first + wide.to(tl.int64) * SCAN, size)
        if phase == 0:
            _phase_zero(
                w, u, maxima_at + zero, counts, scratch, threshold, record, size + zero,
                n + zero, rank, crowd, share, room, spill, item, ITEMS, BLOCK, SAMPLE, ROWS,
                THREADS, WHOLE, COPIES,
            )  # fmt: skip
        else:
            t = load_shared(w + BOUND)
            shift = load_shared(w + SHIFT)
            if phase == 1:
                strategy, bin = choose_strategy(w, k, spill, threshold, count, record, item, COPIES)
                if count is not None:
                    fill_padding(indices, values, k, size.to(tl.int32), item, ITEMS)
                if (strategy == BY_BINS) & (bin >= 0):
                    narrow(w, cand, scratch, item * LISTS, t, shift, bin, LISTS)
            else:
                strategy = load_shared(w + STRATEGY)
                busy = (strategy == BY_DIGITS) | (phase == 2)
                if phase == 2:
                    clear_words(w + COARSE, COPIES * COARSE_BINS, item, ITEMS, 512)
                    if counts is not None:
                        clear_words(counts, COUNTED, item, ITEMS, 512)
                    if strategy == BY_BINS:
                        emit_candidates(
                            w, cand, scratch, t, shift, indices, values, record, item, LISTS, LOOKS
                        )
            if strategy == BY_DIGITS:
                if phase > 2:
                    wait_for_items(work, (phase - BEGIN) * ITEMS)
                if phase <= PASSES:
                    count_digits(w, u, first, last, load_shared(w + WANTED), phase - 1, SCAN)
            if ((strategy == WITH_ZEROS) & (phase == 2)) | (
                (strategy == BY_DIGITS) & (phase > PASSES)
            ):
                emit_entries(
                    w, u, first, last, strategy, indices, values, count, record, item, ITEMS, LOOKS,
                    SCAN // 128,
                )  # fmt: skip
        if busy:
            finish_item(work)
            number = next_ticket(work)
            busy = number < (PHASES - BEGIN) * ITEMS
    reset_counters(work)
