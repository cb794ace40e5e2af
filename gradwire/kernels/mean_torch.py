"""The reference of mean: plain torch, any device."""

import torch
from torch import Tensor


def mean_torch(rows: Tensor) -> Tensor:
    """See `mean`."""
    total = rows[0].float()
    for row in rows[1:]:
        total = total + row.float()
    # A tensor, not a number: CUDA multiplies by the reciprocal of a number.
    return total / torch.full((), float(len(rows)), dtype=torch.float32, device=rows.device)
