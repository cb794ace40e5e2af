"""momentum: add the gradient to the momentum, and the momentum to the residual."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels.dispatch import versions
from gradwire.kernels.last_selection import LastSelection
from gradwire.kernels.pieces import Piece
from gradwire.kernels.scan import ALONE, usable


def momentum(
    residual: Tensor,
    velocity: Tensor,
    pieces: Sequence[Piece],
    maxima: Tensor | None,
    block: int,
    factor: float,
    unscale: Tensor | None = None,
    nesterov: bool = False,
    last_selection: LastSelection | None = None,
) -> Tensor:
    """Update velocity = factor * velocity + gradient and residual += velocity, in place.

    With `nesterov`: velocity = factor * (velocity + gradient), residual += velocity + gradient.
    This is the momentum correction of Lin et al. (2018). A waiting entry of the residual is a sum
    of velocities. An entry that is sent late therefore has the momentum that it would have had.
    Return True (0-d bool) if every entry was finite. An entry whose velocity or sum is not usable
    keeps its old values: see `scan.usable`. The other arguments are those of `scan`.
    velocity: fp32, as long as the residual; entries outside all pieces stay unchanged.
    last_selection (CUDA): the maxima are counted there for the next selection.
    Moves 20 bytes per entry for fp32 gradients.
    """
    version = _momentum_on(residual.device)
    counts = () if last_selection is None else (last_selection,)
    return version(residual, velocity, pieces, maxima, block, factor, unscale, nesterov, *counts)


def momentum_cpu(
    residual: Tensor,
    velocity: Tensor,
    pieces: Sequence[Piece],
    maxima: Tensor | None,
    block: int,
    factor: float,
    unscale: Tensor | None = None,
    nesterov: bool = False,
) -> Tensor:
    """Compute `momentum` in stretches that one thread handles: see `ALONE`."""
    stretches = [
        (place + start, gradient[start : start + ALONE])
        for place, gradient in pieces
        for start in range(0, gradient.numel(), ALONE)
    ]
    finite = momentum_torch(residual, velocity, stretches, None, block, factor, unscale, nesterov)
    if maxima is not None:
        for start in range(0, residual.numel(), ALONE):
            part = residual[start : start + ALONE]
            first = start // block
            rows = maxima[first : first + part.numel() // block]
            torch.amax(part.abs().view(-1, block), dim=1, out=rows)
    return finite


def momentum_torch(
    residual: Tensor,
    velocity: Tensor,
    pieces: Sequence[Piece],
    maxima: Tensor | None,
    block: int,
    factor: float,
    unscale: Tensor | None = None,
    nesterov: bool = False,
) -> Tensor:
    """Compute `momentum` with torch ops."""
    finite = torch.ones((), dtype=torch.bool, device=residual.device)
    for place, gradient in pieces:
        span = slice(place, place + gradient.numel())
        kept, speed = residual[span], velocity[span]
        added = gradient.float() if unscale is None else gradient.float() * unscale
        faster = (speed + added) * factor if nesterov else speed * factor + added
        u = kept + (faster + added if nesterov else faster)
        # Momentum repeats what was let in before. Refused, it would be refused in every step.
        good = usable(faster, speed) & usable(u, kept.abs() + speed.abs())
        finite = finite & good.all()
        speed.copy_(torch.where(good, faster, speed))
        kept.copy_(torch.where(good, u, kept))
    if maxima is not None:
        torch.amax(residual.abs().view(-1, block), dim=1, out=maxima)
    return finite


_momentum_on = versions(
    momentum_torch, cpu=momentum_cpu, triton="gradwire.kernels.triton.momentum.momentum_triton"
)
