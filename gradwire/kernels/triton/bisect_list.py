"""bisect_list on CUDA: one launch, in phases.

In each phase every item counts its listed entries that reach each of 16 edges. The last item to
finish adds up the counts and computes the next edges. The first phases search for the magnitude
that k/2 entries reach, four bits per phase. Then the edges are the 14 tests. The counts of the
tests also give the place of each item's entries in the last phase, the write.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.bisect_list import HALVINGS
from gradwire.kernels.last_selection import LastSelection
from gradwire.kernels.triton.bits import load_shared, magnitude
from gradwire.kernels.triton.launch import Launcher
from gradwire.kernels.triton.select.turns import (
    CROWDED,
    DONE,
    LAST_INDEX,
    finish_item,
    next_ticket,
    reset_counters,
    wait_for_items,
)
from gradwire.kernels.triton.workspace import workspace

TILE = tl.constexpr(512)
TESTS = tl.constexpr(HALVINGS)
# More than the bits of any magnitude.
NEVER = tl.constexpr(0x7FFFFFFF)
# The task of a phase: find the extremes, search for k/2, test, write.
EXTREMES = tl.constexpr(0)
SEARCH = tl.constexpr(1)
TEST = tl.constexpr(2)
WRITE = tl.constexpr(3)
# Words of scratch: 16 edges, the words named below, 16 counts per item, then a place per item.
TASK = tl.constexpr(16)
LOW = tl.constexpr(17)
SHIFT = tl.constexpr(18)
MEAN = tl.constexpr(19)
TOP = tl.constexpr(20)
LEAST = tl.constexpr(21)
FOUND = tl.constexpr(22)
TABLE = tl.constexpr(32)


@triton.jit
def _extremes(counters, u, values, step, n, first, last, item, ITEMS: tl.constexpr):
    """Store an item's largest magnitude, its smallest, counted down, and its share of mean |u|."""
    top = tl.zeros([TILE], tl.int32)
    down = tl.zeros([TILE], tl.int32)
    for start in range(first, last, TILE):
        i = start + tl.arange(0, TILE)
        bits = magnitude(tl.load(values + i, mask=i < last, other=0))
        top = tl.maximum(top, bits)
        down = tl.maximum(down, tl.where(i < last, NEVER - bits, 0))
    total = tl.zeros([TILE], tl.float64)
    for start in range(item * TILE, n, ITEMS * TILE):
        i = start + tl.arange(0, TILE)
        total += tl.abs(tl.load(u + i.to(tl.int64) * step, mask=i < n, other=0).to(tl.float64))
    tl.store(counters, tl.max(top, axis=0))
    tl.store(counters + 1, tl.max(down, axis=0))
    tl.store(counters + 2, (tl.sum(total) / n).to(tl.float32).to(tl.int32, bitcast=True))


@triton.jit
def _count(counters, scratch, values, first, last):
    """Count the item's entries that reach each edge; all edges are above zero."""
    column = tl.arange(0, 16)
    edges = tl.load(scratch + column, cache_modifier=".cg")
    counts = tl.zeros([TILE, 16], tl.int32)
    for start in range(first, last, TILE):
        i = start + tl.arange(0, TILE)
        bits = magnitude(tl.load(values + i, mask=i < last, other=0))
        counts += (bits[:, None] >= edges[None, :]).to(tl.int32)
    tl.store(counters + column, tl.sum(counts, axis=0))


@triton.jit
def _write(chosen, passed, indices, values, least, base, first, last):
    """Write an item's entries that pass, from place `base` on."""
    for start in range(first, last, TILE):
        i = start + tl.arange(0, TILE)
        value = tl.load(values + i, mask=i < last, other=0)
        ones = (magnitude(value) >= least).to(tl.int32)
        place = base + tl.cumsum(ones, axis=0) - ones
        tl.store(chosen + place, tl.load(indices + i, mask=i < last, other=0), mask=ones > 0)
        tl.store(passed + place, value, mask=ones > 0)
        base += tl.sum(ones)


@triton.jit
def _pad(chosen, passed, passing, room, size, item, ITEMS: tl.constexpr):
    first = passing.to(tl.int64) + item * TILE
    for start in range(first, room, ITEMS * TILE):
        i = start + tl.arange(0, TILE)
        tl.store(chosen + i, tl.zeros([TILE], tl.int32) + size, mask=i < room)
        tl.store(passed + i, tl.zeros([TILE], passed.dtype.element_ty), mask=i < room)


@triton.jit
def _store_search_edges(scratch, low, shift):
    """Store the next edges of the search: 15 even steps above `low`, which k/2 entries reach."""
    column = tl.arange(0, 16)
    edges = low.to(tl.int64) + ((column + 1).to(tl.int64) << shift)
    edges = tl.where(column < 15, tl.minimum(edges, NEVER), NEVER).to(tl.int32)
    tl.store(scratch + column, edges)
    tl.store(scratch + LOW, low)
    tl.store(scratch + SHIFT, shift)
    tl.store(scratch + TASK, SEARCH)


@triton.jit
def _begin_search(scratch, ITEMS: tl.constexpr):
    """Combine the extremes of all items into the mean and the first edges of the search."""
    item = tl.arange(0, ITEMS) * 16
    top = tl.max(tl.load(scratch + TABLE + item, cache_modifier=".cg"), axis=0)
    low = NEVER - tl.max(tl.load(scratch + TABLE + item + 1, cache_modifier=".cg"), axis=0)
    parts = tl.load(scratch + TABLE + item + 2, cache_modifier=".cg")
    mean = tl.sum(parts.to(tl.float32, bitcast=True))
    tl.store(scratch + MEAN, mean.to(tl.int32, bitcast=True))
    tl.store(scratch + TOP, top)
    shift = 0
    while (top - low) >> shift >= 16:
        shift += 1
    _store_search_edges(scratch, low, shift)


@triton.jit
def _store_test_edges(scratch, low):
    """Store the edges of the 14 tests on the way to `low`, and `low` itself.

    k/2 entries reach `low`.
    """
    mean = load_shared(scratch + MEAN).to(tl.float32, bitcast=True)
    span = load_shared(scratch + TOP).to(tl.float32, bitcast=True) - mean
    goal = (low.to(tl.float32, bitcast=True) - mean) / span
    # NaN becomes 0.
    goal = tl.where(goal > 0, tl.minimum(goal, 1.0), 0.0)
    column = tl.arange(0, 16)
    parts = (1 << column).to(tl.float32)
    ratio = tl.maximum(tl.ceil(goal * parts) - 0.5, 0.5) / parts
    edges = tl.minimum(magnitude(mean + ratio * span), NEVER - 1) + 1
    # Zeros never pass.
    edges = tl.where(column < TESTS, edges, tl.where(column == TESTS, tl.maximum(low, 1), NEVER))
    tl.store(scratch + column, edges)
    tl.store(scratch + TASK, TEST)


@triton.jit
def _store_result(scratch, count, record, k, counts, n, ITEMS: tl.constexpr):
    """Store the final threshold and each item's place in the output.

    The threshold is the first test that stops the bisection, lowered until k/2 entries pass.
    """
    column = tl.arange(0, 16)
    edges = tl.load(scratch + column, cache_modifier=".cg")
    stops = ((n > k) & (n - k < k) & (column < TESTS)) | (column == TESTS - 1)
    chosen = tl.min(tl.where(stops, column, 16), axis=0)
    test = tl.sum(tl.where(column == chosen, edges, 0))
    half = tl.sum(tl.where(column == TESTS, edges, 0))
    chosen = tl.where(test <= half, chosen, TESTS)
    least = tl.minimum(test, half)
    each = tl.sum(tl.where(column[None, :] == chosen, counts, 0), axis=1)
    item = tl.arange(0, ITEMS)
    tl.store(scratch + TABLE + ITEMS * 16 + item, tl.cumsum(each, axis=0) - each)
    passing = tl.sum(each)
    tl.store(scratch + LEAST, least)
    tl.store(scratch + FOUND, passing)
    tl.store(scratch + TASK, WRITE)
    tl.store(count, passing)
    if record is not None:
        # Otherwise the whole list passes, and the recorded threshold of the list is right.
        if least - 1 >= tl.load(record):
            tl.store(record, least - 1)
            tl.store(record + LAST_INDEX, -1)
            # This threshold says nothing about the end of the next 2k entries.
            tl.store(record + CROWDED, 0)


@triton.jit
def _decide(scratch, count, record, k, task, ITEMS: tl.constexpr):
    """Prepare the next phase; the last item of a phase calls it."""
    if task == EXTREMES:
        _begin_search(scratch, ITEMS)
    else:
        row = tl.arange(0, ITEMS)[:, None] * 16
        table = scratch + TABLE + row + tl.arange(0, 16)[None, :]
        counts = tl.load(table, cache_modifier=".cg")
        n = tl.sum(counts, axis=0)
        if task == SEARCH:
            low = load_shared(scratch + LOW)
            shift = load_shared(scratch + SHIFT)
            low += tl.sum((n >= k - k // 2).to(tl.int32)) << shift
            tl.debug_barrier()
            if shift > 0:
                _store_search_edges(scratch, low, tl.maximum(shift - 4, 0))
            else:
                _store_test_edges(scratch, low)
        else:
            _store_result(scratch, count, record, k, counts, n, ITEMS)


@triton.jit(do_not_specialize=["size", "step", "n", "room", "k"])
def _bisect(
    chosen, passed, count, work, scratch, u, indices, values, record, size, step, n, room, k,
    ITEMS: tl.constexpr,
):  # fmt: skip
    share = tl.cdiv(room, ITEMS).to(tl.int64)
    busy = size >= 0
    while busy:
        number = next_ticket(work)
        phase = number // ITEMS
        item = number % ITEMS
        wait_for_items(work, phase * (ITEMS + 1))
        first = item * share
        last = tl.minimum(first + share, room)
        counters = scratch + TABLE + item * 16
        task = tl.where(phase == 0, EXTREMES, load_shared(scratch + TASK))
        # Each phase has as many items as there are programs, so every program ends with an item of
        # the last phase.
        busy = task != WRITE
        if busy:
            if task == EXTREMES:
                _extremes(counters, u, values, step, n, first, last, item, ITEMS)
            else:
                _count(counters, scratch, values, first, last)
            tl.debug_barrier()
            done = tl.atomic_add(work + DONE, 1, sem="acq_rel")
            if done == phase * (ITEMS + 1) + ITEMS - 1:
                _decide(scratch, count, record, k, task, ITEMS)
                finish_item(work)
        else:
            base = load_shared(scratch + TABLE + ITEMS * 16 + item)
            _write(chosen, passed, indices, values, load_shared(scratch + LEAST), base, first, last)
            _pad(chosen, passed, load_shared(scratch + FOUND), room, size, item, ITEMS)
    reset_counters(work)


_launch = Launcher(
    _bisect, "chosen passed count work scratch record", num_warps=8, enable_fp_fusion=False
)


def bisect_list_triton(
    u: Tensor,
    step: int,
    indices: Tensor,
    values: Tensor,
    k: int,
    last_selection: LastSelection | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `bisect_list` in one launch of about ten phases; each reads the listed values."""
    room = indices.numel()
    chosen, passed = torch.empty_like(indices), torch.empty_like(values)
    count = torch.empty((), dtype=torch.int32, device=u.device)
    items = 128 if room > 1 << 14 else 8
    work, scratch = workspace(32 + 17 * items, u.device)
    record = None if last_selection is None else last_selection.record
    _launch(
        items, u, chosen, passed, count, work, scratch, u, indices, values, record, u.numel(),
        step, -(-u.numel() // step), room, k, items,
    )  # fmt: skip
    if last_selection is not None:
        last_selection.remember(chosen, passed)
    return chosen, passed, count
