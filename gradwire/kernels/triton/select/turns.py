"""Let the programs of one launch do phases of work in turn, without a grid barrier.

Work is cut into items, numbered phase by phase. A program takes the next number, waits until all
items of the earlier phases are done, does its item, and takes another. A program waits only for
smaller numbers. Those belong to programs that are running. Nothing therefore depends on the number
of programs that the device runs at once. A single program would do everything.
"""

import triton
import triton.language as tl

from gradwire.kernels import last_selection

# Words of the workspace (int32). The five counters, each on a cache line of its own, and COARSE are
# zero between calls; the others are cleared in the first phase.
TICKET = tl.constexpr(0)
DONE = tl.constexpr(32)
TOTAL = tl.constexpr(64)
SPILLED = tl.constexpr(96)
LEFT = tl.constexpr(128)
# The header: the bound, the width of a coarse bin, the strategy, the bin of the k-th magnitude (-1:
# every candidate wins), the number of entries above that bin, k, and the least winning magnitude.
HEADER = tl.constexpr(160)
BOUND = tl.constexpr(160)
SHIFT = tl.constexpr(161)
STRATEGY = tl.constexpr(162)
BIN = tl.constexpr(163)
ABOVE = tl.constexpr(164)
WANTED = tl.constexpr(165)
LEAST = tl.constexpr(166)
DIGITS = tl.constexpr(256)
PASSES = tl.constexpr(8)
LOOK = tl.constexpr(384)
MAX_ITEMS = 1024
CLEARED = tl.constexpr(128 + 2 * MAX_ITEMS)
FINE = tl.constexpr(2432)
FINE_BITS = tl.constexpr(17)
COARSE = tl.constexpr(2432 + (1 << 17))
COARSE_BINS = tl.constexpr(2048)
COPIES = 8
WORDS = 2432 + (1 << 17) + 2048 * COPIES
SEEN = tl.constexpr(1 << 62)
# Places in the record of `LastSelection`; the threshold is at 0.
LAST_INDEX = tl.constexpr(last_selection.LAST_INDEX)
CROWDED = tl.constexpr(last_selection.CROWDED)


@triton.jit
def striped(bin):
    """Return the word of a coarse bin, with neighbouring bins on different cache lines.

    Magnitudes crowd just above the bound, and a cache line takes one addition at a time. If there
    are many candidates, there are also copies of all bins.
    """
    return (bin & 63) * 32 + (bin >> 6)


@triton.jit
def next_ticket(work):
    """Take the next number."""
    return tl.atomic_add(work + TICKET, 1, sem="relaxed")


@triton.jit
def wait_for_items(work, items):
    """Wait until `items` items are done, so that their results can be read.

    The result is zero, but the compiler cannot know. Pointers with the result added are therefore
    not computed once for all phases, where they would fill the registers.
    """
    done = tl.atomic_add(work + DONE, 0, sem="acquire")
    while done < items:
        done = tl.atomic_add(work + DONE, 0, sem="acquire")
    return (done >> 30) * 64


@triton.jit
def finish_item(work):
    """Mark this item as done, so that its results may be read."""
    tl.debug_barrier()
    tl.atomic_add(work + DONE, 1, sem="release")


@triton.jit
def reset_counters(work):
    """Set the counters to zero for the next call; the last program to leave does so."""
    if tl.atomic_add(work + LEFT, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(work + TICKET, 0)
        tl.store(work + DONE, 0)
        tl.store(work + TOTAL, 0)
        tl.store(work + SPILLED, 0)
        tl.store(work + LEFT, 0)


@triton.jit
def clear_words(words, count, item, items, WIDTH: tl.constexpr):
    """Set this item's share of `count` words to zero."""
    share = tl.cdiv(count, items)
    for start in range(0, share, WIDTH):
        i = start + tl.arange(0, WIDTH)
        place = item * share + i
        tl.store(words + place, tl.zeros([WIDTH], tl.int32), mask=(i < share) & (place < count))


@triton.jit
def look_back(work, item, more, ties, ITEMS: tl.constexpr):
    """Return the number of entries above the bound, and equal to it, in the items before this one.

    This item's two counts are published in one word. Then those of all smaller items are awaited.
    """
    words = (work + LOOK).to(tl.pointer_type(tl.int64))
    own_counts = SEEN + (more.to(tl.int64) << 31) + ties.to(tl.int64)
    tl.atomic_xchg(words + item, own_counts, sem="relaxed")
    other = tl.arange(0, ITEMS)
    word = tl.load(words + other, mask=other < item, other=0, volatile=True)
    while tl.sum((word >> 62).to(tl.int32)) < item:
        word = tl.load(words + other, mask=other < item, other=0, volatile=True)
    low = word & 0x7FFFFFFF
    high = (word >> 31) & 0x7FFFFFFF
    return tl.sum(high).to(tl.int32), tl.sum(low).to(tl.int32)
