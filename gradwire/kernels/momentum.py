"""momentum: the scan with momentum correction."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradwire.kernels.backend import uses_triton
from gradwire.kernels.edge import Edge
from gradwire.kernels.momentum_cpu import momentum_cpu
from gradwire.kernels.momentum_torch import momentum_torch
from gradwire.kernels.pieces import Piece


def momentum(
    residual: Tensor,
    velocity: Tensor,
    pieces: Sequence[Piece],
    maxima: Tensor | None,
    group: int,
    factor: float,
    unscale: Tensor | None = None,
    nesterov: bool = False,
    edge: Edge | None = None,
) -> Tensor:
    """As `scan`, but velocity = factor * velocity + gradient, and residual += velocity, in place.

    With `nesterov`: velocity = factor * (velocity + gradient), residual += velocity + gradient.
    Momentum correction of Lin et al. (2018): what waits in the residual is the sum of velocities,
    so an entry that is sent late has the momentum it would have had. velocity: fp32, as long as
    the residual; what no piece covers stays as it is. An entry whose velocity or sum is not finite
    keeps both as they were. edge (CUDA): counts the maxima, for the selection.
    Moves 20 bytes an entry for fp32 gradients.
    """
    version = _version(residual.device)
    counts = () if edge is None else (edge,)
    return version(residual, velocity, pieces, maxima, group, factor, unscale, nesterov, *counts)


@functools.cache
def _version(device: torch.device) -> Callable[..., Tensor]:
    if uses_triton(device):
        from gradwire.kernels.momentum_triton import momentum_triton

        return momentum_triton
    return momentum_cpu if device.type == "cpu" else momentum_torch
