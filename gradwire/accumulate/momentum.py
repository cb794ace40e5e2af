"""Momentum correction and local clipping: the way of a gradient into u."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.kernels.pieces import Piece
from gradwire.types import Sparse


@dataclass(frozen=True)
class Correction:
    """Momentum correction of Lin et al. (2018), "Deep Gradient Compression".

    The correction works with any method and exchange:

        g = g * min(1, clip / sqrt(P) / |g|)
        m = momentum * m + g,  u = residual + m
        nesterov: m = momentum * (m + g),  u = residual + m + g
        masking: m = 0 where something of u was delivered

    An entry that waits in the residual gathers the momentum it would have had. The optimiser must
    not add momentum again. Masking forgets the momentum of an entry that has just arrived late, so
    that the momentum is not carried on. In a bundle that is sent whole nothing is late and nothing
    is masked. Such a bundle gets plain SGD with momentum.

    Different from the paper: |g| is the L2 norm of one bundle's gradient, because a bundle is on
    its way before the last one is there. The rule clips only if the norm of the whole gradient
    would clip. The whole stays below sqrt(bundles) times the bound. With one bundle the rule is the
    paper's. (The released code clips tensor by tensor.)
    """

    momentum: float = 0.0
    nesterov: bool = False
    masking: bool = True
    clip: float = 0.0


def clip_factor(
    pieces: Sequence[Piece], clip: float, ranks: int, unscale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the factor for the gradient (unscaling included), and True (0-d) if it clips.

    Entries that are not finite do not count. Such entries never get in, and the other entries must
    not be lost.
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
    """Return the indices at which momentum is masked: this worker's entries in the update.

    An entry that another worker cut (gTop-k), or that rounding made zero, goes on waiting.
    """
    arrived = (sent.values != 0) & (update[sent.indices] != 0)
    return torch.where(arrived, sent.indices, sent.size)
