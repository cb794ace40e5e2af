"""What happens to a gradient on its way into u: momentum correction and local clipping."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.kernels.pieces import Piece
from gradwire.types import Sparse


@dataclass(frozen=True)
class Correction:
    """Of Lin et al. (2018), "Deep Gradient Compression", for any method and exchange.

        g = g * min(1, clip / sqrt(P) / |g|)
        m = momentum * m + g,  u = residual + m
        nesterov: m = momentum * (m + g),  u = residual + m + g
        masking: m = 0 where something of u was delivered

    An entry that waits in the residual gathers the momentum it would have had, and the optimiser
    must have none of its own. Masking forgets the momentum of what has just arrived late, so that
    it is not carried on. Where a bundle is sent whole nothing is late and nothing is masked: that
    is SGD with momentum.

    Different from the paper: |g| is the L2 norm of one bundle's gradient, because a bundle is on
    its way before the last one is there. It clips only where the norm of the whole would, and
    keeps the whole below sqrt(bundles) times the bound; with one bundle it is the paper's rule.
    (The released code clips tensor by tensor.)
    """

    momentum: float = 0.0
    nesterov: bool = False
    masking: bool = True
    clip: float = 0.0


def clip_factor(
    pieces: Sequence[Piece], clip: float, ranks: int, unscale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What to multiply the gradient with, unscaling included, and whether that clips it.

    Entries that are not finite do not count: they never get in, and the rest must not be lost.
    """
    norms = [
        torch.linalg.vector_norm(torch.nan_to_num(g, 0, 0, 0), dtype=torch.float64)
        for _, g in pieces
    ]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    if unscale is not None:
        norm = norm * unscale
    bound = clip / math.sqrt(ranks)
    factor = torch.where(norm > bound, bound / norm, 1.0)
    return (factor if unscale is None else factor * unscale).float(), norm > bound


def to_mask(update: Tensor, sent: Sparse) -> Tensor:
    """Where momentum is masked: entries of which this worker gave something to the update.

    An entry that another worker cut (gTop-k), or that rounding made zero, goes on waiting.
    """
    arrived = (sent.values != 0) & (update[sent.indices] != 0)
    return torch.where(arrived, sent.indices, sent.size)
