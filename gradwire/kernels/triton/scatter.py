"""settle on CUDA: one scatter."""

import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.triton.launch import Launcher

TILE = 256


@triton.jit(do_not_specialize=["count", "size"], do_not_specialize_on_alignment=["skipped"])
def _settle(buffer, indices, values, skipped, count, size, TILE: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    happened = tl.load(skipped) == 0
    index = tl.load(indices + i, mask=i < count, other=size)
    value = tl.load(values + i, mask=i < count, other=0).to(tl.float32)
    real = (index >= 0) & (index < size)
    old = tl.load(buffer + index, mask=real, other=0)
    tl.store(buffer + index, old - value * happened.to(tl.float32), mask=real)
    if tl.program_id(0) == 0:
        # size may be 2^31 - 1, so the offset of the spare entry needs 64 bits.
        tl.store(buffer + size.to(tl.int64), 0.0)


_launch = Launcher(_settle, "skipped", num_warps=4, enable_fp_fusion=False)


def settle_triton(buffer: Tensor, indices: Tensor, values: Tensor, skipped: Tensor) -> None:
    """Compute `settle` in one launch; it moves 8 bytes and two sectors of 32 per entry."""
    count = indices.numel()
    grid = max(1, -(-count // TILE))
    _launch(grid, buffer, buffer, indices, values, skipped, count, buffer.numel() - 1, TILE)
