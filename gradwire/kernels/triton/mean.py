"""mean on CUDA: one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.triton.launch import Launcher

TILE = 1024


@triton.jit(do_not_specialize=["n", "ranks"])
def _mean(out, rows, n, ranks, TILE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    total = tl.load(rows + i, mask=i < n, other=0).to(tl.float32)
    for _ in range(1, ranks):
        rows += n
        total += tl.load(rows + i, mask=i < n, other=0).to(tl.float32)
    tl.store(out + i, tl.div_rn(total, ranks.to(tl.float32)), mask=i < n)


_launch = Launcher(_mean, "out", num_warps=4)


def mean_triton(rows: Tensor) -> Tensor:
    """Compute `mean` in one launch that reads the rows once."""
    ranks, n = rows.shape
    out = torch.empty(n, dtype=torch.float32, device=rows.device)
    _launch(max(1, -(-n // TILE)), rows, out, rows, n, ranks, TILE)
    return out
