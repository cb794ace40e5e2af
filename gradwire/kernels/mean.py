"""mean: the mean of one row per rank, added in rank order."""

import torch
from torch import Tensor

from gradwire.kernels.dispatch import versions


def mean(rows: Tensor) -> Tensor:
    """Return the fp32 mean of contiguous float rows [ranks, n], added in rank order in fp32."""
    return _mean_on(rows.device)(rows)


def mean_torch(rows: Tensor) -> Tensor:
    """Compute `mean` with torch ops."""
    total = rows[0].float()
    for row in rows[1:]:
        total = total + row.float()
    # A tensor, not a number: CUDA multiplies by the reciprocal of a number.
    return total / torch.full((), float(len(rows)), dtype=torch.float32, device=rows.device)


_mean_on = versions(mean_torch, triton="gradwire.kernels.triton.mean.mean_triton")
