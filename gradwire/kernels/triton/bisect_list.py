"""halve on CUDA: one launch, in phases.

In each phase all items count what of the list reaches each of 16 edges; whoever is last adds up,
and says what the next edges are. First they close in on the magnitude that k/2 entries reach, four
bits a phase; then they are the 14 tests. What is counted there says also where each item's entries
go in the last phase.
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
    finish,
    next_ticket,
    reset_counters,
    wait,
)
from gradwire.kernels.triton.workspace import workspace

TILE = tl.constexpr(512)
TESTS = tl.constexpr(HALVINGS)
# More than the bits of any magnitude.
NEVER = tl.constexpr(0x7FFFFFFF)
# What the items do in a phase: extremes, a search for k/2, the tests, the end.
EXTREMES = tl.constexpr(0)
SEARCH = tl.constexpr(1)
TEST = tl.constexpr(2)
WRITE = tl.constexpr(3)
# Words of scratch: 16 edges, then what is known, then 16 record an item, then one.
WHAT = tl.constexpr(16)
LOW = tl.constexpr(17)
SHIFT = tl.constexpr(18)
MEAN = tl.constexpr(19)
TOP = tl.constexpr(20)
LEAST = tl.constexpr(21)
FOUND = tl.constexpr(22)
TABLE = tl.constexpr(32)


@triton.jit
def _extremes(mine, u, values, step, n, first, last, item, ITEMS: tl.constexpr):
    """An item's largest magnitude, its smallest, counted down, and its share of mean |u|."""
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
    tl.store(mine, tl.max(top, axis=0))
    tl.store(mine + 1, tl.max(down, axis=0))
    tl.store(mine + 2, (tl.sum(total) / n).to(tl.float32).to(tl.int32, bitcast=True))


@triton.jit
def _count(mine, scratch, values, first, last):
    """How many of an item's entries reach each edge; all edges are above zero."""
    column = tl.arange(0, 16)
    edges = tl.load(scratch + column, cache_modifier=".cg")
    counts = tl.zeros([TILE, 16], tl.int32)
    for start in range(first, last, TILE):
        i = start + tl.arange(0, TILE)
        bits = magnitude(tl.load(values + i, mask=i < last, other=0))
        counts += (bits[:, None] >= edges[None, :]).to(tl.int32)
    tl.store(mine + column, tl.sum(counts, axis=0))


@triton.jit
def _write(where, passed, indices, values, least, base, first, last):
    """An item's entries that pass, from `base` on."""
    for start in range(first, last, TILE):
        i = start + tl.arange(0, TILE)
        value = tl.load(values + i, mask=i < last, other=0)
        ones = (magnitude(value) >= least).to(tl.int32)
        place = base + tl.cumsum(ones, axis=0) - ones
        tl.store(where + place, tl.load(indices + i, mask=i < last, other=0), mask=ones > 0)
        tl.store(passed + place, value, mask=ones > 0)
        base += tl.sum(ones)


@triton.jit
def _pad(where, passed, found, room, size, item, ITEMS: tl.constexpr):
    first = found.to(tl.int64) + item * TILE
    for start in range(first, room, ITEMS * TILE):
        i = start + tl.arange(0, TILE)
        tl.store(where + i, tl.zeros([TILE], tl.int32) + size, mask=i < room)
        tl.store(passed + i, tl.zeros([TILE], passed.dtype.element_ty), mask=i < room)


@triton.jit
def _closer(scratch, low, shift):
    """The next edges of the search: 15 even steps above `low`, which k/2 entries reach."""
    column = tl.arange(0, 16)
    edges = low.to(tl.int64) + ((column + 1).to(tl.int64) << shift)
    edges = tl.where(column < 15, tl.minimum(edges, NEVER), NEVER).to(tl.int32)
    tl.store(scratch + column, edges)
    tl.store(scratch + LOW, low)
    tl.store(scratch + SHIFT, shift)
    tl.store(scratch + WHAT, SEARCH)


@triton.jit
def _span(scratch, ITEMS: tl.constexpr):
    """What all items saw: the mean, and where the search begins."""
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
    _closer(scratch, low, shift)


@triton.jit
def _tests(scratch, low):
    """The edges of the 14 tests on the way to what k/2 entries reach, `low`; and that itself."""
    mean = load_shared(scratch + MEAN).to(tl.float32, bitcast=True)
    span = load_shared(scratch + TOP).to(tl.float32, bitcast=True) - mean
    goal = (low.to(tl.float32, bitcast=True) - mean) / span
    # Of what is no number it is 0.
    goal = tl.where(goal > 0, tl.minimum(goal, 1.0), 0.0)
    column = tl.arange(0, 16)
    parts = (1 << column).to(tl.float32)
    ratio = tl.maximum(tl.ceil(goal * parts) - 0.5, 0.5) / parts
    edges = tl.minimum(magnitude(mean + ratio * span), NEVER - 1) + 1
    # Zeros never pass.
    edges = tl.where(column < TESTS, edges, tl.where(column == TESTS, tl.maximum(low, 1), NEVER))
    tl.store(scratch + column, edges)
    tl.store(scratch + WHAT, TEST)


@triton.jit
def _settle(scratch, count, record, k, counts, n, ITEMS: tl.constexpr):
    """The first test that stops the search, or what k/2 entries reach; each item's place."""
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
    found = tl.sum(each)
    tl.store(scratch + LEAST, least)
    tl.store(scratch + FOUND, found)
    tl.store(scratch + WHAT, WRITE)
    tl.store(count, found)
    if record is not None:
        # Otherwise the whole list passes, and its edge is right.
        if least - 1 >= tl.load(record):
            tl.store(record, least - 1)
            tl.store(record + LAST_INDEX, -1)
            # It says nothing of where the next 2k entries end.
            tl.store(record + CROWDED, 0)


@triton.jit
def _decide(scratch, count, record, k, what, ITEMS: tl.constexpr):
    """What the last item of a phase does: prepares the next."""
    if what == EXTREMES:
        _span(scratch, ITEMS)
    else:
        row = tl.arange(0, ITEMS)[:, None] * 16
        there = scratch + TABLE + row + tl.arange(0, 16)[None, :]
        counts = tl.load(there, cache_modifier=".cg")
        n = tl.sum(counts, axis=0)
        if what == SEARCH:
            low = load_shared(scratch + LOW)
            shift = load_shared(scratch + SHIFT)
            low += tl.sum((n >= k - k // 2).to(tl.int32)) << shift
            tl.debug_barrier()
            if shift > 0:
                _closer(scratch, low, tl.maximum(shift - 4, 0))
            else:
                _tests(scratch, low)
        else:
            _settle(scratch, count, record, k, counts, n, ITEMS)


@triton.jit(do_not_specialize=["size", "step", "n", "room", "k"])
def _halve(
    where, passed, count, work, scratch, u, indices, values, record, size, step, n, room, k,
    ITEMS: tl.constexpr,
):  # fmt: skip
    share = tl.cdiv(room, ITEMS).to(tl.int64)
    busy = size >= 0
    while busy:
        number = next_ticket(work)
        phase = number // ITEMS
        item = number % ITEMS
        wait(work, phase * (ITEMS + 1))
        first = item * share
        last = tl.minimum(first + share, room)
        mine = scratch + TABLE + item * 16
        what = tl.where(phase == 0, EXTREMES, load_shared(scratch + WHAT))
        # Every program ends with one item of the last phase: there are as many.
        busy = what != WRITE
        if busy:
            if what == EXTREMES:
                _extremes(mine, u, values, step, n, first, last, item, ITEMS)
            else:
                _count(mine, scratch, values, first, last)
            tl.debug_barrier()
            done = tl.atomic_add(work + DONE, 1, sem="acq_rel")
            if done == phase * (ITEMS + 1) + ITEMS - 1:
                _decide(scratch, count, record, k, what, ITEMS)
                finish(work)
        else:
            base = load_shared(scratch + TABLE + ITEMS * 16 + item)
            _write(where, passed, indices, values, load_shared(scratch + LEAST), base, first, last)
            _pad(where, passed, load_shared(scratch + FOUND), room, size, item, ITEMS)
    reset_counters(work)


_launch = Launcher(
    _halve, "where passed count work scratch record", num_warps=8, enable_fp_fusion=False
)


def bisect_list_triton(
    u: Tensor,
    step: int,
    indices: Tensor,
    values: Tensor,
    k: int,
    last_selection: LastSelection | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `bisect_list`. Reads the values, 4 bytes an entry, in each of about ten phases."""
    room = indices.numel()
    where, passed = torch.empty_like(indices), torch.empty_like(values)
    count = torch.empty((), dtype=torch.int32, device=u.device)
    items = 128 if room > 1 << 14 else 8
    work, scratch = workspace(32 + 17 * items, u.device)
    record = None if last_selection is None else last_selection.record
    _launch(
        items, u, where, passed, count, work, scratch, u, indices, values, record, u.numel(),
        step, -(-u.numel() // step), room, k, items,
    )  # fmt: skip
    if last_selection is not None:
        last_selection.remember(where, passed)
    return where, passed, count
