"""sidco_fit on CUDA: one launch, one phase per stage; and sidco_adapt.

In each phase every item adds up the magnitudes of its share of the sample that pass. The last item
to finish adds up the items in their order, and computes the next threshold. The first phase also
copies the sample, which lies far apart in u.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.sidco import EVERY, FEW, FIRST, MANY
from gradwire.kernels.triton.bits import load_shared
from gradwire.kernels.triton.launch import Launcher
from gradwire.kernels.triton.select.turns import (
    DONE,
    finish_item,
    next_ticket,
    reset_counters,
    wait_for_items,
)
from gradwire.kernels.triton.workspace import workspace

OFTEN = tl.constexpr(EVERY)
LOW = tl.constexpr(FEW * EVERY)
HIGH = tl.constexpr(MANY * EVERY)


LIMIT = 128
TILE = 1024
QUARTER = tl.constexpr(math.log(1 / FIRST))
# Words of scratch: a threshold, the largest, then for each item a sum (8 bytes), a count, the
# smallest and the largest; then the copy of the sample.
SUMS = tl.constexpr(2)
COUNTS = tl.constexpr(2 + 2 * LIMIT)
LEASTS = tl.constexpr(2 + 3 * LIMIT)
TOPS = tl.constexpr(2 + 4 * LIMIT)
COPY = tl.constexpr(2 + 5 * LIMIT)


@triton.jit
def _number(word):
    """Return the fp32 whose bits the word holds."""
    return word.to(tl.float32, bitcast=True)


@triton.jit
def _add_up(scratch, u, step, n, phase, item, ITEMS: tl.constexpr, TILE: tl.constexpr):
    """Store sum, count, smallest and largest of an item's magnitudes above the threshold.

    In phase 0 every magnitude counts, and the sample is copied.
    """
    total = tl.zeros([TILE], tl.float64)
    count = tl.zeros([TILE], tl.int32)
    least = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    top = tl.zeros([TILE], tl.int32)
    copy = scratch + COPY
    edge = tl.where(phase == 0, -1, load_shared(scratch))
    for start in range(item * TILE, n, ITEMS * TILE):
        i = start + tl.arange(0, TILE)
        inside = i < n
        if phase == 0:
            x = tl.load(u + i.to(tl.int64) * step, mask=inside, other=0).to(tl.float32)
            bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            tl.store(copy + i, bits, mask=inside)
        else:
            bits = tl.load(copy + i, mask=inside, other=0, cache_modifier=".cg")
        passes = inside & (bits > edge)
        total += tl.where(passes, _number(bits), 0.0).to(tl.float64)
        count += passes.to(tl.int32)
        least = tl.minimum(least, tl.where(passes, bits, 0x7FFFFFFF))
        top = tl.maximum(top, tl.where(inside, bits, 0))
    tl.store((scratch + SUMS).to(tl.pointer_type(tl.float64)) + item, tl.sum(total))
    tl.store(scratch + COUNTS + item, tl.sum(count))
    tl.store(scratch + LEASTS + item, tl.min(least, axis=0))
    tl.store(scratch + TOPS + item, tl.max(top, axis=0))


@triton.jit
def _next_threshold(scratch, phase, stages, single_log, staged_log, ITEMS: tl.constexpr):
    """Return the threshold after this phase, fp32."""
    item = tl.arange(0, ITEMS)
    sums = (scratch + SUMS).to(tl.pointer_type(tl.float64))
    total = tl.sum(tl.load(sums + item, cache_modifier=".cg"))
    count = tl.sum(tl.load(scratch + COUNTS + item, cache_modifier=".cg"))
    least = tl.min(tl.load(scratch + LEASTS + item, cache_modifier=".cg"), axis=0)
    top = tl.max(tl.load(scratch + TOPS + item, cache_modifier=".cg"), axis=0)
    mean = (total / tl.maximum(count, 1)).to(tl.float32)
    low = _number(tl.where(count > 0, least, top))
    log = tl.maximum(staged_log / tl.maximum(stages - 1, 1).to(tl.float32), 0.0)
    after = tl.where(count > 0, low + (mean - low) * log, low)
    first = mean * tl.where(stages == 1, single_log, QUARTER)
    return tl.where(phase == 0, first, after)


@triton.jit(do_not_specialize=["step", "n", "most"])
def _fit(
    out,
    work,
    scratch,
    u,
    at,
    single_log,
    staged_log,
    step,
    n,
    most,
    ITEMS: tl.constexpr,
    TILE: tl.constexpr,
):
    stages = tl.minimum(tl.maximum(tl.load(at).to(tl.int32), 1), most)
    number = next_ticket(work)
    while number < stages * ITEMS:
        phase = number // ITEMS
        wait_for_items(work, phase * (ITEMS + 1))
        _add_up(scratch, u, step, n, phase, number % ITEMS, ITEMS, TILE)
        tl.debug_barrier()
        done = tl.atomic_add(work + DONE, 1, sem="acq_rel")
        if done == phase * (ITEMS + 1) + ITEMS - 1:
            t = _next_threshold(scratch, phase, stages, single_log, staged_log, ITEMS)
            tl.store(scratch, t.to(tl.int32, bitcast=True))
            tl.store(out, t)
            finish_item(work)
        number = next_ticket(work)
    reset_counters(work)


_launch_fit = Launcher(
    _fit, "out work scratch single_log staged_log", num_warps=4, enable_fp_fusion=False
)


def sidco_fit_triton(u: Tensor, step: int, share: float, stages: Tensor, most: int) -> Tensor:
    """Compute `sidco_fit` in one launch.

    Moves 36 bytes per sampled entry, and 4 in each stage after the first.
    """
    n = -(-u.numel() // step)
    out = torch.empty((), dtype=torch.float32, device=u.device)
    work, scratch = workspace(COPY.value + n, u.device)
    items = min(LIMIT, 1 << ((n - 1) // TILE).bit_length())
    _launch_fit(
        items, u, out, work, scratch, u, stages, math.log(1 / share), math.log(FIRST / share),
        step, n, most, items, TILE,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["most"])
def _adapt(stages, calls, ratios, count, share, most):
    ratio = tl.load(ratios) + tl.load(count).to(tl.float32) * share
    call = tl.load(calls) + 1
    due = call % OFTEN == 0
    change = (ratio < LOW).to(tl.int32) - (ratio > HIGH).to(tl.int32)
    wanted = tl.load(stages) + tl.where(due, change, 0)
    tl.store(stages, tl.minimum(tl.maximum(wanted, 1), most))
    tl.store(calls, call)
    tl.store(ratios, tl.where(due, 0.0, ratio))


# One warp reads everything before it writes.
_launch_adapt = Launcher(_adapt, "share", num_warps=1, enable_fp_fusion=False)


def sidco_adapt_triton(
    stages: Tensor, calls: Tensor, ratios: Tensor, count: Tensor, k: int, most: int
) -> None:
    """Compute `sidco_adapt` in one launch."""
    _launch_adapt(1, stages, stages, calls, ratios, count, 1 / max(1, k), most)
