"""The reference of once: plain torch, any device, no host sync."""

import torch
from torch import Tensor

from gradwire.kernels.level_torch import just_below


def once_torch(kept: Tensor, u: Tensor, step: int, scale: float) -> Tensor:
    """See `once`."""
    seen = u[::step].abs().to(torch.promote_types(u.dtype, torch.float32))
    kept.copy_(torch.where(kept > 0, kept, torch.linalg.vector_norm(seen) * scale))
    return just_below(kept)
