"""Every entry: the baseline for all other methods."""

import torch
from torch import Tensor

from gradwire.compress.method import Method
from gradwire.types import Memory, Scan, Sparse


def dense(u: Tensor, k: int, memory: Memory, scan: Scan | None = None) -> Sparse:
    """Every entry of u, whatever the density."""
    indices = torch.arange(u.numel(), dtype=torch.int32, device=u.device)
    count = torch.full((), u.numel(), dtype=torch.int32, device=u.device)
    return Sparse(indices, u.clone(), count, u.numel(), common=True)


METHOD = Method(
    dense,
    common=lambda options: True,
    capacity=lambda k, size, options: size,
    block=lambda k, size, device, options: 0,
)
