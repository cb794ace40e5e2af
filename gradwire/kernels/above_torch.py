"""The reference of above: plain torch, any device, no host sync."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.kernels.topk_torch import topk_torch


def above_torch(
    u: Tensor, threshold: Tensor, capacity: int, maxima: Tensor | None = None, group: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """See `above`. The largest, with what does not pass as zeros, which are left out then."""
    size, room = u.numel(), min(capacity, u.numel())
    magnitude = u.abs().to(torch.promote_types(u.dtype, torch.float32))
    passes = magnitude > threshold
    largest = topk_torch(torch.where(passes, magnitude, 0), room)
    indices = torch.where(passes[largest], largest, size).sort().values
    indices = pad(indices, (0, capacity - room), value=size)
    real = indices < size
    values = torch.where(real, u[indices.clamp(max=size - 1)], 0)
    return indices, values, real.sum(dtype=torch.int32)
