"""ranked on CUDA: one program searches for the bits of each value, two at a time."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.launch_triton import Launcher, aligned
from gradwire.kernels.ranked_torch import ranked_torch

MOST = 8192
"""Values that one program holds in its registers."""


@triton.jit
def _search(bits, rank):
    """The bits of the rank-th largest: the highest number that so many reach."""
    t = tl.where(tl.sum((bits >= 1 << 30).to(tl.int32)) >= rank, 1 << 30, 0)
    for round in range(15):
        one = 1 << (28 - 2 * round)
        # Three counts in one sum.
        marks = (bits >= t + one).to(tl.int64)
        marks += (bits >= t + 2 * one).to(tl.int64) << 20
        marks += (bits >= t + 3 * one).to(tl.int64) << 40
        counts = tl.sum(marks)
        reach = ((counts & 0xFFFFF) >= rank).to(tl.int32)
        reach += (((counts >> 20) & 0xFFFFF) >= rank).to(tl.int32)
        reach += ((counts >> 40) >= rank).to(tl.int32)
        t += reach * one
    return t


@triton.jit(do_not_specialize=["n", "step", "first", "second"])
def _ranked(out, values, n, step, first, second, TWO: tl.constexpr, MOST: tl.constexpr):
    i = tl.arange(0, MOST)
    seen = tl.load(values + i.to(tl.int64) * step, mask=i < n, other=0)
    # What is not there is below everything.
    bits = tl.where(i < n, seen.to(tl.int32, bitcast=True), -1)
    tl.store(out, _search(bits, first).to(tl.float32, bitcast=True))
    if TWO:
        tl.store(out + 1, _search(bits, second).to(tl.float32, bitcast=True))


_launch = Launcher(_ranked, num_warps=8)


def ranked_triton(values: Tensor, step: int, *ranks: int) -> Tensor:
    """See `ranked`. One launch for one or two ranks of at most 8192 values."""
    n = -(-values.numel() // step)
    if n > MOST or len(ranks) > 2:
        return ranked_torch(values, step, *ranks)
    out = torch.empty(len(ranks), device=values.device)
    most = 4096 if n <= 4096 else MOST
    key = (len(ranks), most, *aligned(values))
    _launch(1, key, values, out, values, n, step, ranks[0], ranks[-1], len(ranks) == 2, most)
    return out
