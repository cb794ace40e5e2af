"""The reference of scan: plain torch, any device, no host sync."""

from collections.abc import Sequence

import torch
from torch import Tensor


def scan_torch(
    residual: Tensor,
    pieces: Sequence[tuple[int, Tensor]],
    maxima: Tensor | None,
    group: int,
    unscale: Tensor | None = None,
) -> Tensor:
    """See `scan`."""
    finite = torch.ones((), dtype=torch.bool, device=residual.device)
    for offset, gradient in pieces:
        kept = residual[offset : offset + gradient.numel()]
        gradient = gradient.float() if unscale is None else gradient.float() * unscale
        u = (kept.float() + gradient).to(kept.dtype)
        good = torch.isfinite(u)
        finite = finite & good.all()
        kept.copy_(torch.where(good, u, kept))
    if maxima is not None:
        maxima.copy_(residual.abs().view(-1, group).amax(dim=1))
    return finite
