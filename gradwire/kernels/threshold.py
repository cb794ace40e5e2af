"""A threshold that is kept from the first vector that is not zero; and the number below another."""

import torch
from torch import Tensor

from gradwire.kernels.dispatch import versions


def first_threshold(kept: Tensor, u: Tensor, step: int, scale: float) -> Tensor:
    """Return the fp32 (0-d) just below `kept`, and set `kept` first if it is 0.

    kept: 0-d fp32, at least 0. It becomes `scale` times the norm of every `step`-th entry of u.
    Versions may differ in the last bits of the norm.
    """
    return _first_threshold_on(u.device)(kept, u, step, scale)


def just_below(magnitude: Tensor) -> Tensor:
    """Return the next smaller fp32, so that exactly `magnitude` and more lies above it; 0 for 0."""
    return torch.nextafter(magnitude, torch.zeros_like(magnitude))


def first_threshold_torch(kept: Tensor, u: Tensor, step: int, scale: float) -> Tensor:
    """Compute `first_threshold` with torch ops."""
    norm = torch.linalg.vector_norm(u[::step], dtype=torch.float64)  # fp32 squares may be infinite
    kept.copy_(torch.where(kept > 0, kept, norm * scale))
    return just_below(kept)


_first_threshold_on = versions(
    first_threshold_torch, triton="gradwire.kernels.triton.threshold.first_threshold_triton"
)
