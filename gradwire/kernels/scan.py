"""scan: residual += gradient, in place, with the maximum of every group on the way."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradwire.kernels.backend import uses_triton
from gradwire.kernels.edge import Edge
from gradwire.kernels.pieces import Piece
from gradwire.kernels.scan_cpu import scan_cpu
from gradwire.kernels.scan_torch import scan_torch

__all__ = ["Piece", "scan"]


def scan(
    residual: Tensor,
    pieces: Sequence[Piece],
    maxima: Tensor | None,
    group: int,
    unscale: Tensor | None = None,
    edge: Edge | None = None,
    skipped: Tensor | None = None,
) -> Tensor:
    """Whether every entry was finite (0-d bool); `residual` becomes u, `maxima` is filled.

    residual: fp32 or bf16, a multiple of `group` long. pieces: flat gradients in any float dtype,
    each starting at a multiple of `group`; together they cover what changes. maxima: fp32, one for
    each group, or None when nobody needs them; int16 (CUDA) for the 16 bits after the sign.
    unscale: 0-d factor on the gradient (1 / loss scale). An entry whose sum is not finite keeps its
    old residual, so a bad gradient never gets in. A bf16 residual forgets what rounding u takes
    away.
    edge (CUDA): counts the maxima, for the selection. With `skipped` (0-d bool) the residual still
    holds what the last selection chose: unless it is true, that is cleared first.
    Moves 12 bytes an entry for fp32 gradients.
    """
    version = _version(residual.device, residual.dtype)
    if edge is None:
        return version(residual, pieces, maxima, group, unscale)
    return version(residual, pieces, maxima, group, unscale, edge, skipped)


@functools.cache
def _version(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    if uses_triton(device):
        from gradwire.kernels.scan_triton import scan_triton

        return scan_triton
    return scan_cpu if device.type == "cpu" and dtype == torch.float32 else scan_torch
