"""The reference of momentum: plain torch, any device, no host sync."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels.pieces import Piece


def momentum_torch(
    residual: Tensor,
    velocity: Tensor,
    pieces: Sequence[Piece],
    maxima: Tensor | None,
    group: int,
    factor: float,
    unscale: Tensor | None = None,
    nesterov: bool = False,
) -> Tensor:
    """See `momentum`."""
    finite = torch.ones((), dtype=torch.bool, device=residual.device)
    for place, gradient in pieces:
        there = slice(place, place + gradient.numel())
        kept, speed = residual[there], velocity[there]
        given = gradient.float() if unscale is None else gradient.float() * unscale
        faster = (speed + given) * factor if nesterov else speed * factor + given
        u = kept + (faster + given if nesterov else faster)
        good = torch.isfinite(faster) & torch.isfinite(u)
        finite = finite & good.all()
        speed.copy_(torch.where(good, faster, speed))
        kept.copy_(torch.where(good, u, kept))
    if maxima is not None:
        torch.amax(residual.abs().view(-1, group), dim=1, out=maxima)
    return finite
