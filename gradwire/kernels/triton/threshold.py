"""first_threshold on CUDA: one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.triton.bits import magnitude
from gradwire.kernels.triton.launch import Launcher

TILE = 4096


@triton.jit
def _root_mean_square(u, step, n, TILE: tl.constexpr):
    """Return the root of the mean square of n entries, summed in fp64, which cannot overflow.

    Moves 32 bytes per entry if step is 8 or more.
    """
    total = tl.zeros([TILE], tl.float64)
    for start in range(0, n, TILE):
        i = start + tl.arange(0, TILE)
        x = tl.load(u + i.to(tl.int64) * step, mask=i < n, other=0).to(tl.float64)
        total += x * x
    return tl.sqrt(tl.sum(total) / n).to(tl.float32)


@triton.jit(do_not_specialize=["step", "n"])
def _first_threshold(out, kept, u, scale, step, n, TILE: tl.constexpr):
    size = tl.load(kept)
    if size <= 0:
        size = _root_mean_square(u, step, n, TILE) * scale
        tl.store(kept, size)
    tl.store(out, tl.maximum(magnitude(size) - 1, 0))


_launch_first = Launcher(_first_threshold, "out scale", num_warps=8)


def first_threshold_triton(kept: Tensor, u: Tensor, step: int, scale: float) -> Tensor:
    """Compute `first_threshold`; only the first call samples u, 32 bytes per sampled entry."""
    n = -(-u.numel() // step)
    out = torch.empty((), dtype=torch.int32, device=u.device)
    _launch_first(1, u, out, kept, u, scale * n**0.5, step, n, TILE)
    return out.view(torch.float32)
