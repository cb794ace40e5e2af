"""once on CUDA: one launch, which reads u only where nothing is kept."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.bits_triton import magnitude
from gradwire.kernels.launch_triton import Launcher, aligned
from gradwire.kernels.level_triton import TILE, average


@triton.jit(do_not_specialize=["step", "n"])
def _once(out, kept, u, scale, step, n, TILE: tl.constexpr):
    size = tl.load(kept)
    if size <= 0:
        size = average(u, step, n, True, TILE) * scale
        tl.store(kept, size)
    tl.store(out, tl.maximum(magnitude(size) - 1, 0))


_launch = Launcher(_once, num_warps=8)


def once_triton(kept: Tensor, u: Tensor, step: int, scale: float) -> Tensor:
    """See `once`. Moves 32 bytes for each sampled entry, the first time."""
    n = -(-u.numel() // step)
    out = torch.empty((), dtype=torch.int32, device=u.device)
    key = (u.dtype, *aligned(u, kept))
    _launch(1, key, u, out, kept, u, scale * n**0.5, step, n, TILE)
    return out.view(torch.float32)
