"""topk on CUDA: one launch, no host sync, exactly k entries in order.

Phase 0: a bound from a sample of the group maxima, the groups that reach it, their entries that do.
Phase 1: the coarse bin of the k-th magnitude; its candidates counted by their last bits.
Phase 2: the k-th magnitude exactly; winners to their places, ties to the smaller index.
When fewer than k entries are not zero, phase 2 takes the rest from the zeros. When the candidates
are too few (an unlucky sample) or too many (ties, one scale against another), phases 1 to 8 count
digits over all of u instead, and phase 9 writes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.exact_triton import count_digits, edge_of, emit, emit_all, find, narrow
from gradwire.kernels.launch_triton import Launcher
from gradwire.kernels.plan_triton import SAMPLE, WARPS, plan, processors
from gradwire.kernels.prune_triton import bound, compact, gather, gather_all
from gradwire.kernels.scan_triton import group_maxima
from gradwire.kernels.topk import group_size
from gradwire.kernels.turns_triton import (
    CLEARED,
    COARSE,
    COARSE_BINS,
    DIGITS,
    FINE,
    FINE_BITS,
    HEADER,
    PASSES,
    SPILLED,
    TOTAL,
    clear,
    finish,
    leave,
    take,
    wait,
)
from gradwire.kernels.workspace_triton import counters

PHASES = tl.constexpr(10)
BY_DIGITS = tl.constexpr(0)
BY_BINS = tl.constexpr(1)
WITH_ZEROS = tl.constexpr(2)
SCAN = tl.constexpr(4096)


@triton.jit
def _prune(
    work, u, maxima, ids, cand, meta, size, n, rank, crowd, share, room, spill, item,
    ITEMS: tl.constexpr, GROUP: tl.constexpr, SAMPLE: tl.constexpr, ROWS: tl.constexpr,
    GATHER: tl.constexpr,
):  # fmt: skip
    """Phase 0 of one item: its candidates, into its own room or, when that is full, the spill."""
    clear(work + DIGITS, CLEARED, item, ITEMS, 512)
    t, seen, largest = bound(maxima, n, rank, SAMPLE)
    # Where the sample is full of ties so is the rest: everything would be a candidate.
    crowded = (crowd < 0) | ((seen > crowd) & (t > 0))
    t = tl.maximum(t, 1)
    # Coarse bins just wide enough to reach from the bound to the largest of the sample.
    shift = 12
    while ((largest - t) >> shift >= COARSE_BINS - 1) & (shift < FINE_BITS):
        shift += 1
    clear(work + FINE, 1 << shift, item, ITEMS, 512)
    found = 0
    base = item * room
    if crowded:
        t = 0
    else:
        first = item.to(tl.int64) * share * ROWS * 128
        last = tl.minimum(first + share.to(tl.int64) * ROWS * 128, n)
        groups = 0
        if GROUP > 1:
            groups = compact(maxima, ids + first, first.to(tl.int32), last.to(tl.int32), t, ROWS)
            tl.debug_barrier()
        counted = 0
        limit = room
        again = 1
        while again > 0:
            if GROUP > 1:
                found = gather(
                    work, u, size, ids + first, groups, t, shift, cand + base, counted, limit,
                    GROUP, GATHER,
                )  # fmt: skip
            else:
                found = gather_all(
                    work, u, first, last, t, shift, cand + base, counted, limit, ROWS
                )
            again = 0
            if (found > limit) & (limit == room):
                start = tl.atomic_add(work + SPILLED, found, sem="relaxed")
                if start + found <= spill:
                    base = ITEMS * room + start
                    counted = room
                    limit = found
                    again = 1
        tl.atomic_add(work + TOTAL, found, sem="relaxed")
    tl.store(meta + 2 * item, base)
    tl.store(meta + 2 * item + 1, found)
    tl.store(work + HEADER, t)
    tl.store(work + HEADER + 1, shift)


@triton.jit
def _settle_on(work, k, spill):
    """Phase 1: how the k-th magnitude is found, its coarse bin, and how many lie above that."""
    bin, above = find(work + COARSE, COARSE_BINS, k, COARSE_BINS)
    total = tl.load(work + TOTAL, cache_modifier=".cg")
    fits = tl.load(work + SPILLED, cache_modifier=".cg") <= spill
    zeros = fits & (total < k) & (tl.load(work + HEADER, cache_modifier=".cg") == 1)
    good = fits & (total >= k) & (bin < COARSE_BINS - 1)
    way = tl.where(good, BY_BINS, tl.where(zeros, WITH_ZEROS, BY_DIGITS))
    tl.store(work + HEADER + 2, way)
    tl.store(work + HEADER + 3, bin)
    tl.store(work + HEADER + 4, above)
    return way, bin


@triton.jit(do_not_specialize=["size", "k", "n", "rank", "crowd", "share", "room", "spill", "wide"])
def _topk(
    work, u_at, maxima_at, scratch, indices, values,
    size, k, n, rank, crowd, share, room, spill, wide,
    ITEMS: tl.constexpr, LOOKS: tl.constexpr, GROUP: tl.constexpr, SAMPLE: tl.constexpr,
    ROWS: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    cap = ITEMS * room + spill
    number = take(work)
    busy = number < PHASES * ITEMS
    while busy:
        phase = number // ITEMS
        item = number % ITEMS
        zero = (number >> 30) * 64
        if phase > 0:
            zero = wait(work, tl.minimum(phase, 2) * ITEMS)
        # Pointers that seem new in every phase: kept for all phases they would fill the registers.
        w = work + zero
        u = u_at + zero
        maxima = maxima_at + zero
        meta = scratch + zero
        cand = (meta + 2 * ITEMS).to(tl.pointer_type(tl.int64))
        ids = meta + 2 * ITEMS + cap + cap
        first = item.to(tl.int64) * wide * SCAN
        last = tl.minimum(first + wide.to(tl.int64) * SCAN, size)
        if phase == 0:
            _prune(
                w, u, maxima, ids, cand, meta, size + zero, n + zero, rank, crowd, share, room,
                spill, item, ITEMS, GROUP, SAMPLE, ROWS, GATHER,
            )  # fmt: skip
        else:
            t = tl.load(w + HEADER, cache_modifier=".cg")
            shift = tl.load(w + HEADER + 1, cache_modifier=".cg")
            base = tl.load(meta + 2 * item, cache_modifier=".cg")
            count = tl.load(meta + 2 * item + 1, cache_modifier=".cg")
            if phase == 1:
                way, bin = _settle_on(w, k, spill)
                if way == BY_BINS:
                    narrow(w, cand + base, count, t, shift, bin, 1024)
            else:
                way = tl.load(w + HEADER + 2, cache_modifier=".cg")
                busy = (way == BY_DIGITS) | (phase == 2)
                if phase == 2:
                    clear(w + COARSE, COARSE_BINS, item, ITEMS, 512)
                    if way == BY_BINS:
                        bin = tl.load(w + HEADER + 3, cache_modifier=".cg")
                        above = tl.load(w + HEADER + 4, cache_modifier=".cg")
                        low, more = find(w + FINE, 1 << shift, k - above, 4096)
                        edge = t + (bin << shift) + low
                        need = k - above - more
                        emit(w, cand + base, count, edge, need, indices, values, item, LOOKS, 16)
            if way == BY_DIGITS:
                if phase > 2:
                    wait(work, phase * ITEMS)
                if phase <= PASSES:
                    count_digits(w, u, first, last, k, phase - 1, SCAN)
            if ((way == WITH_ZEROS) & (phase == 2)) | ((way == BY_DIGITS) & (phase > PASSES)):
                edge, need = edge_of(w, k, PASSES)
                if way == WITH_ZEROS:
                    edge = 0
                    need = k - tl.load(w + TOTAL, cache_modifier=".cg")
                emit_all(w, u, first, last, edge, need, indices, values, item, LOOKS, SCAN // 128)
        if busy:
            finish(work)
            number = take(work)
            busy = number < PHASES * ITEMS
    leave(work)


_launch = Launcher(_topk, num_warps=WARPS)


def topk_triton(
    u: Tensor, k: int, maxima: Tensor | None = None, group: int = 0
) -> tuple[Tensor, Tensor]:
    """Indices (see `topk`) and values. Moves 4 / group bytes an entry and 4 group + 24 a winner."""
    device, size = u.device, u.numel()
    indices = torch.empty(k, dtype=torch.int32, device=device)
    values = torch.empty(k, dtype=u.dtype, device=device)
    if k == 0:
        return indices, values
    if maxima is None:
        group = group_size(size, k, device)
        maxima = group_maxima(u, group) if group else None
    p = plan(size, k, group if maxima is not None else 1, processors(device))
    scratch = torch.empty(p.words, dtype=torch.int32, device=device)
    # u may be a slice that begins anywhere; everything else is an allocation of its own.
    key = (p.items, p.group, p.rows, p.gather, u.dtype, u.data_ptr() % 16, maxima is None)
    _launch(
        p.items, key, u, counters(device), u, u if maxima is None else maxima, scratch, indices,
        values, size, k, p.n, p.rank, p.crowd, p.share, p.room, p.spill, p.wide,
        p.items, triton.next_power_of_2(p.items), p.group, SAMPLE, p.rows, p.gather,
    )  # fmt: skip
    return indices, values
