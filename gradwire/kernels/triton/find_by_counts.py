"""find_by_counts on CUDA: one launch, one phase per pass.

In each phase every item counts the block maxima of its share above eight tests. When all have
counted, every item reads the blocks of its share that may hold an entry above a test. A test that
more blocks than enough pass needs no reading. The last item to finish takes the next tests from the
counts; see select/turns.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.find_by_counts import HALVINGS, PASSES, Aim
from gradwire.kernels.triton.bits import INFINITY, bits_of, load_shared, magnitude
from gradwire.kernels.triton.launch import Launcher
from gradwire.kernels.triton.select.prune import compact
from gradwire.kernels.triton.select.turns import DONE, finish_item, next_ticket, wait_for_items

LANES = tl.constexpr(8)
"""Tests of one phase; between two known thresholds only seven of them."""
SHARE = 512
"""Block maxima of an item, or a multiple of it."""
LIMIT = 512
"""Items at most: a GPU runs about as many programs at once."""
WARPS = 4
TILE = 1024
"""Maxima that are counted together."""
WIDTH = 64
"""Entries per row if there are no maxima."""
# Words of the workspace behind the counters of select/turns.py, all zero at first: the state, then
# for each phase eight counts of blocks and eight counts of entries.
MODE = tl.constexpr(160)
RUNG = tl.constexpr(161)
ABOVE = tl.constexpr(162)
BOTTOM = tl.constexpr(163)
TOP = tl.constexpr(164)
COUNTS = tl.constexpr(192)
NEVER = tl.constexpr(0x7FFFFFFF)
"""The bits of a test that nothing passes."""
# Values of MODE.
ON_LADDER = tl.constexpr(0)
BETWEEN = tl.constexpr(1)
FOUND = tl.constexpr(2)


@triton.jit
def _at(place, span, step):
    """Return the bits of the threshold at a place: the place itself, or even steps along a span."""
    if span is None:
        return place
    else:
        low = tl.load(span).to(tl.float64)
        high = tl.load(span + 1).to(tl.float64)
        # `step` is a power of two, so only the last product and sum round.
        t = low + (place.to(tl.float64) * step) * (high - low)
        return magnitude(t.to(tl.float32))


@triton.jit
def _place(bottom, top, lane):
    """Return the places of the seven tests between two known ones, the highest first."""
    width = (top - bottom).to(tl.int64)
    return bottom + ((width * (7 - lane)) >> 3).to(tl.int32)


@triton.jit
def _tests(work, ladder, span, step, mode, bottom, top, rungs, lane):
    """Return the bits of this phase's tests, and True for each that is one."""
    if mode == ON_LADDER:
        rung = load_shared(work + RUNG) + lane
        real = rung < rungs
        tests = lane * 0
        if ladder is not None:
            tests = magnitude(tl.load(ladder + rung, mask=real, other=0))
    else:
        real = lane < 7
        tests = _at(_place(bottom, top, lane), span, step)
    return tl.where(real, tests, NEVER), real


@triton.jit
def _lane(values, lane, which):
    """Return the value of one lane."""
    return tl.sum(tl.where(lane == which, values, 0))


@triton.jit
def _marks(bits, tests, lane, FIRST: tl.constexpr):
    """Return a word per entry: a byte for each of four tests, 1 if the entry lies above it."""
    word = bits * 0
    for j in tl.static_range(4):
        word += (bits > _lane(tests, lane, FIRST + j)).to(tl.int32) << (8 * j)
    return word


@triton.jit
def _add_marks(low, high, lane):
    """Return the sums of the eight bytes of two words per entry."""
    words = tl.where((lane < 4)[:, None], low[None, :], high[None, :])
    return tl.sum((words >> ((lane & 3) * 8)[:, None]) & 255, axis=1)


@triton.jit
def _count_blocks(maxima, first, last, tests, lane, TILE: tl.constexpr):
    """Return how many maxima in [first, last) surely lie above each test."""
    i = tl.arange(0, TILE)
    total = lane * 0
    for start in range(first, last, TILE):
        inside = start + i < last
        bits = tl.where(inside, bits_of(tl.load(maxima + start + i, mask=inside, other=0)), 0)
        low = _marks(bits, tests, lane, 0)
        total += _add_marks(low, _marks(bits, tests, lane, 4), lane)
    return total


@triton.jit
def _count_entries(
    u, size, ids, first, blocks, tests, lane,
    NAMED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return how many entries of some blocks lie above each test; NAMED: of the blocks in `ids`.

    A row is a part of a block that belongs to one thread, which reads 16 bytes at a time.
    """
    WIDTH: tl.constexpr = BLOCK if BLOCK < 32 else 32
    SPLIT: tl.constexpr = BLOCK // WIDTH
    SOME: tl.constexpr = 128 // u.dtype.element_ty.primitive_bitwidth
    some = tl.arange(0, SOME)[None, :]
    row = tl.arange(0, ROWS)
    total = lane * 0
    for start in range(0, blocks * SPLIT, ROWS):
        r = start + row
        named = r < blocks * SPLIT
        block = first + r // SPLIT
        if NAMED:
            block = tl.load(ids + block, mask=named, other=0)
        # The last block's entries may lie past the end, but not past 2^31 - 1.
        begin = block * BLOCK + r % SPLIT * WIDTH
        low = row * 0
        high = row * 0
        for j in tl.static_range(0, WIDTH, SOME):
            at = begin[:, None] + (some + j)
            bits = magnitude(tl.load(u + at, mask=named[:, None] & (at < size), other=0))
            low += tl.sum(_marks(bits, tests, lane, 0), axis=1)
            high += tl.sum(_marks(bits, tests, lane, 4), axis=1)
        total += _add_marks(low, high, lane)
    return total


@triton.jit
def _decide(
    work, out, n, tests, real, span, step, mode, bottom, top, rungs, least, most, fine_least,
    fine_most, lane,
):  # fmt: skip
    """Store the next state after a phase that counted n entries above each test."""
    wanted = tl.where(mode == ON_LADDER, least, fine_least)
    accepted = tl.where(mode == ON_LADDER, most, fine_most)
    first = tl.min(tl.where(real & (n >= wanted), lane, LANES), axis=0)
    reached = first < LANES
    fits = reached & (_lane(n, lane, first) <= accepted)
    if mode == ON_LADDER:
        rung = load_shared(work + RUNG)
        above = tl.where(rung == 0, INFINITY, load_shared(work + ABOVE))
        over = rung + LANES >= rungs
        last = _lane(tests, lane, tl.minimum(rungs - rung, LANES) - 1)
        bottom = tl.where(reached, _lane(tests, lane, first), last)
        top = tl.where(reached & (first == 0), above, _lane(tests, lane, first - 1))
        top = tl.where(reached, top, last)
        done = fits | (over & (first == LANES))
        tl.store(work + RUNG, rung + LANES)
        tl.store(work + ABOVE, last)
        after = tl.where(reached, BETWEEN, ON_LADDER)
    else:
        place = _place(bottom, top, lane)
        above = tl.where(first == 0, top, _lane(place, lane, tl.minimum(first, 7) - 1))
        bottom = tl.where(reached, _lane(place, lane, first), bottom)
        top = above
        done = fits | (top - bottom <= 1)
        after = BETWEEN
    tl.store(work + BOTTOM, bottom)
    tl.store(work + TOP, top)
    tl.store(work + MODE, tl.where(done, FOUND, after))
    if done:
        # Too few entries pass the lower end of a span.
        low = _at(bottom, span, step)
        if span is not None:
            low = tl.where(bottom == 0, 0, low)
        tl.store(out, low)
        tl.store(out + 1, _at(top, span, step))


@triton.jit(
    do_not_specialize=[
        "size", "n", "rungs", "least", "most", "sure", "fine_least", "fine_most", "end", "share",
        "items", "phases",
    ]
)  # fmt: skip
def _find(
    out, work, u, maxima, ids, ladder, span, step, size, n, rungs, least, most, sure, fine_least,
    fine_most, end, share, items, phases,
    BLOCK: tl.constexpr, THREADS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, 8)
    # With maxima every item has two turns in a phase. A count that others still add to may not
    # decide what is read: the threads of one program would see different counts.
    turns = items
    if maxima is not None:
        turns = 2 * items
    number = next_ticket(work)
    going = number < phases * turns
    while going:
        phase = number // turns
        reads = number % turns >= turns - items
        item = number % items
        finished = phase * (turns + 1)
        wait_for_items(work, finished + tl.where(reads, turns - items, 0))
        mode = load_shared(work + MODE)
        bottom = load_shared(work + BOTTOM)
        top = load_shared(work + TOP)
        if span is not None:
            mode = tl.where(phase == 0, BETWEEN, mode)
            top = tl.where(phase == 0, end, top)
        if mode == FOUND:
            going = False
        else:
            tests, real = _tests(work, ladder, span, step, mode, bottom, top, rungs, lane)
            enough = tl.where(mode == ON_LADDER, sure, fine_most)
            first = item * share
            last = tl.minimum(first + share, n)
            counts = work + COUNTS + 16 * phase + lane
            if reads:
                blocks = last - first
                if maxima is not None:
                    readable = load_shared(counts) <= enough
                    lowest = tl.min(tl.where(readable, tests, NEVER), axis=0)
                    blocks = 0
                    if lowest < NEVER:
                        blocks = compact(maxima, ids + first, first, last, lowest + 1, THREADS)
                    tl.debug_barrier()
                if blocks > 0:
                    found = _count_entries(
                        u, size, ids, first, blocks, tests, lane, maxima is not None, BLOCK, THREADS
                    )
                    tl.atomic_add(counts + 8, found, sem="relaxed")
            elif maxima is not None:
                above = _count_blocks(maxima, first, last, tests, lane, TILE)
                tl.atomic_add(counts, above, sem="relaxed")
            tl.debug_barrier()
            done = tl.atomic_add(work + DONE, 1, sem="acq_rel")
            if done == finished + turns - 1:
                entries = load_shared(counts + 8)
                if maxima is not None:
                    sure_blocks = load_shared(counts)
                    entries = tl.where(sure_blocks > enough, sure_blocks, entries)
                _decide(
                    work, out, entries, tests, real, span, step, mode, bottom, top, rungs, least,
                    most, fine_least, fine_most, lane,
                )  # fmt: skip
                finish_item(work)
            number = next_ticket(work)
            going = number < phases * turns


_launch = Launcher(_find, "out work ids ladder span step", num_warps=WARPS, enable_fp_fusion=False)


def find_by_counts_triton(
    u: Tensor, ladder: Tensor | None, span: Tensor | None, aim: Aim,
    maxima: Tensor | None = None, block: int = 0, halvings: int = HALVINGS,
) -> Tensor:  # fmt: skip
    """Compute `find_by_counts` in one launch.

    A pass moves 4 / block bytes per entry (2 / block for maxima of 16 bits), and 4 block for each
    of at most `most` blocks. Without maxima it reads u.
    """
    size = u.numel()
    block = block if maxima is not None else WIDTH
    n = -(-size // block)
    share = SHARE * -(-n // (SHARE * LIMIT))
    items = -(-n // share)
    rungs = 0 if ladder is None else ladder.numel()
    phases = -(-rungs // LANES.value) + PASSES
    work = torch.zeros(COUNTS.value + 16 * phases, dtype=torch.int32, device=u.device)
    out = torch.empty(2, dtype=torch.int32, device=u.device)
    ids = None if maxima is None else torch.empty(n, dtype=torch.int32, device=u.device)
    _launch(
        items, u, out, work, u, maxima, ids, ladder, span, 2.0**-halvings, size, n, rungs,
        aim.least, aim.most, aim.sure(size), aim.fine_least, aim.fine_most, 1 << halvings, share,
        items, phases, block, 32 * WARPS, TILE,
    )  # fmt: skip
    return out.view(torch.float32)
