"""find_threshold and first_threshold on CUDA: one launch each.

In find_threshold one program ranks the maxima, and for some rules another ranks them for a second
rank. One takes the mean, and many look for the largest entry. The last program to finish applies
the rule to these results.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.threshold import ROUNDS, STEP, Rule, find_threshold_torch
from gradwire.kernels.triton.bits import bits_of, load_shared, magnitude
from gradwire.kernels.triton.launch import Launcher
from gradwire.kernels.triton.select.counts import LOW
from gradwire.kernels.triton.select.turns import LEFT, TOTAL
from gradwire.kernels.triton.workspace import workspace

MOST = 8192
"""Maxima that one program holds in its registers."""
TILE = 4096
PARTS = 256
"""Programs at most that look for the largest entry."""
NORMAL = tl.constexpr(int(Rule.NORMAL))
LADDER = tl.constexpr(int(Rule.LADDER))
LIST = tl.constexpr(int(Rule.LIST))
RUNG = tl.constexpr(STEP)
HALVINGS = tl.constexpr(float(1 << ROUNDS))


@triton.jit
def _ranked(maxima, every, n, rank, MOST: tl.constexpr):
    """Return the bits of the rank-th largest of the maxima, found two bits per round."""
    i = tl.arange(0, MOST)
    sample = tl.load(maxima + i.to(tl.int64) * every, mask=i < n, other=0)
    # Cells past the end are below everything.
    bits = tl.where(i < n, bits_of(sample), -1)
    t = tl.where(tl.sum((bits >= 1 << 30).to(tl.int32)) >= rank, 1 << 30, 0)
    # Maxima of 16 bits need only the first eight rounds.
    for round in range(8 if sample.dtype == tl.int16 else 15):
        step = 1 << (28 - 2 * round)
        # Three counts in one sum.
        marks = (bits >= t + step).to(tl.int64)
        marks += (bits >= t + 2 * step).to(tl.int64) << 20
        marks += (bits >= t + 3 * step).to(tl.int64) << 40
        counts = tl.sum(marks)
        reach = ((counts & 0xFFFFF) >= rank).to(tl.int32)
        reach += (((counts >> 20) & 0xFFFFF) >= rank).to(tl.int32)
        reach += ((counts >> 40) >= rank).to(tl.int32)
        t += reach * step
    return t


@triton.jit
def sample_mean(u, step, n, SQUARE: tl.constexpr, TILE: tl.constexpr):
    """Return the root of the mean square of n entries, or the mean magnitude, summed in fp64.

    SQUARE chooses the first. fp64 cannot overflow. Moves 32 bytes per entry if step is 8 or more.
    """
    total = tl.zeros([TILE], tl.float64)
    for start in range(0, n, TILE):
        i = start + tl.arange(0, TILE)
        x = tl.load(u + i.to(tl.int64) * step, mask=i < n, other=0).to(tl.float64)
        total += x * x if SQUARE else tl.abs(x)
    mean = tl.sum(total) / n
    return (tl.sqrt(mean) if SQUARE else mean).to(tl.float32)


@triton.jit
def _furthest(values, part, share, n, LEAST: tl.constexpr, TILE: tl.constexpr):
    """Return the bits of the largest magnitude of a part, or of the smallest, counted down.

    LEAST chooses the smallest. For an empty part it is 0.
    """
    far = tl.zeros([TILE], tl.int32)
    first = part.to(tl.int64) * share * TILE
    for start in range(first, tl.minimum(first + share.to(tl.int64) * TILE, n), TILE):
        i = start + tl.arange(0, TILE)
        bits = magnitude(tl.load(values + i, mask=i < n, other=0))
        if LEAST:
            bits = tl.where(i < n, 0x7FFFFFFF - bits, 0)
        far = tl.maximum(far, bits)
    return tl.max(far, axis=0)


@triton.jit
def _rung(mean, top, sure):
    step = tl.log(top / mean) * RUNG
    return mean * tl.exp(tl.floor(tl.log(sure / mean) / step) * step)


@triton.jit
def _halved(mean, top, sure):
    ratio = tl.floor((sure - mean) / (top - mean) * HALVINGS) / HALVINGS
    return mean + tl.maximum(ratio, 0.0) * (top - mean)


@triton.jit
def _decide(work, scratch, RULE: tl.constexpr):
    """Return the bits of the magnitude that the rule finds."""
    sure = load_shared(scratch)
    if RULE == NORMAL:
        guess = load_shared(scratch + 2)
        return tl.minimum(tl.maximum(guess, load_shared(scratch + 1)), sure)
    elif RULE == LIST:
        return tl.minimum(0x7FFFFFFF - load_shared(work + TOTAL), sure)
    else:
        sure = sure.to(tl.float32, bitcast=True)
        mean = load_shared(scratch + 2).to(tl.float32, bitcast=True).to(tl.float64)
        top = load_shared(work + TOTAL).to(tl.float32, bitcast=True).to(tl.float64)
        if RULE == LADDER:
            threshold = _rung(mean, top, sure.to(tl.float64)).to(tl.float32)
        else:
            threshold = _halved(mean, top, sure.to(tl.float64)).to(tl.float32)
        # Without a scale to step on the threshold is NaN, and `sure` is taken.
        return tl.where(threshold <= sure, threshold, sure).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["step", "n", "every", "m", "first", "second", "size", "share"])
def _find_threshold(
    out, work, scratch, u, maxima, whole, scale, step, n, every, m, first, second, size, share,
    RULE: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    RANKS: tl.constexpr = 2 if RULE == NORMAL else 1
    MEANS: tl.constexpr = 0 if RULE == LIST else 1
    program = tl.program_id(0)
    if program < RANKS:
        bits = _ranked(maxima, every, m, tl.where(program == 0, first, second), MOST)
        tl.store(scratch + program, bits)
    elif program < RANKS + MEANS:
        mean = sample_mean(u, step, n, RULE == NORMAL, TILE)
        if RULE == NORMAL:
            mean *= scale
        tl.store(scratch + 2, mean.to(tl.int32, bitcast=True))
    elif RULE != NORMAL:
        far = _furthest(whole, program - RANKS - MEANS, share, size, RULE == LIST, TILE)
        tl.atomic_max(work + TOTAL, far, sem="relaxed")
    tl.debug_barrier()
    if tl.atomic_add(work + LEFT, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        threshold = _decide(work, scratch, RULE)
        tl.store(out, tl.maximum(threshold - 1, 0))
        tl.debug_barrier()
        tl.store(work + TOTAL, 0)
        tl.store(work + LEFT, 0)


_launch_find = Launcher(_find_threshold, "out work scratch scale", num_warps=8)


def find_threshold_triton(
    rule: Rule, u: Tensor, step: int, maxima: Tensor, every: int, ranks: Sequence[int],
    scale: float = 1.0, whole: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute `find_threshold` in one launch.

    Moves 32 bytes per sampled entry and maximum, and reads `whole` once.
    """
    m, n = -(-maxima.numel() // every), -(-u.numel() // step)
    if m > MOST:
        if maxima.dtype == torch.int16:
            maxima = ((maxima.int() & 0xFFFF) << LOW.value).view(torch.float32)
        return find_threshold_torch(rule, u, step, maxima, every, ranks, scale, whole)
    work, scratch = workspace(3, u.device)
    out = torch.empty((), dtype=torch.int32, device=u.device)
    means, far = {Rule.NORMAL: (1, None), Rule.LIST: (0, u)}.get(rule, (1, whole))
    size = 0 if far is None else far.numel()
    share = max(1, -(-size // (TILE * PARTS)))
    parts = -(-size // (TILE * share))
    most = 4096 if m <= 4096 else MOST
    _launch_find(
        len(ranks) + means + parts, u, out, work, scratch, u, maxima, far, float(scale),
        step, n, every, m, ranks[0], ranks[-1], size, share, int(rule), most, TILE,
    )  # fmt: skip
    return out.view(torch.float32)


@triton.jit(do_not_specialize=["step", "n"])
def _first_threshold(out, kept, u, scale, step, n, TILE: tl.constexpr):
    size = tl.load(kept)
    if size <= 0:
        size = sample_mean(u, step, n, True, TILE) * scale
        tl.store(kept, size)
    tl.store(out, tl.maximum(magnitude(size) - 1, 0))


_launch_first = Launcher(_first_threshold, "out scale", num_warps=8)


def first_threshold_triton(kept: Tensor, u: Tensor, step: int, scale: float) -> Tensor:
    """Compute `first_threshold`; only the first call samples u, 32 bytes per sampled entry."""
    n = -(-u.numel() // step)
    out = torch.empty((), dtype=torch.int32, device=u.device)
    _launch_first(1, u, out, kept, u, scale * n**0.5, step, n, TILE)
    return out.view(torch.float32)
