"""momentum on the CPU: the reference, on blocks that stay in the cache."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels.momentum_torch import momentum_torch
from gradwire.kernels.pieces import Piece
from gradwire.kernels.scan_cpu import ALONE


def momentum_cpu(
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
    blocks = [
        (place + start, gradient[start : start + ALONE])
        for place, gradient in pieces
        for start in range(0, gradient.numel(), ALONE)
    ]
    finite = momentum_torch(residual, velocity, blocks, None, group, factor, unscale, nesterov)
    if maxima is not None:
        for start in range(0, residual.numel(), ALONE):
            part = residual[start : start + ALONE]
            first = start // group
            rows = maxima[first : first + part.numel() // group]
            torch.amax(part.abs().view(-1, group), dim=1, out=rows)
    return finite
