"""Newton-Schulz: the nearest orthogonal matrix of many matrices of one shape at once."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Keller Jordan's coefficients, those of torch.optim.Muon."""
_STEPS = 5
_SMALLEST_NORM = 1e-7
MOST_ENTRIES = 2**26
"""The most entries that are computed at once: 128 MB in bf16, and the iteration holds three."""


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return U V^T of every matrix U S V^T, up to factors from 0.5 to 1.5, in bf16.

    matrices: [n, rows, columns] in bf16. Five steps of X = a X + (b A + c A A) X with A = X X^T, or
    of X = a X + X (b A + c A A) with A = X^T X, whichever A is smaller.
    """
    norms = matrices.flatten(1).norm(dim=1).clamp(min=_SMALLEST_NORM)
    x = matrices / norms[:, None, None]
    is_tall = x.shape[1] > x.shape[2]
    for _ in range(_STEPS):
        gram = x.mT @ x if is_tall else x @ x.mT
        factor = torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C)
        x = torch.baddbmm(x, *((x, factor) if is_tall else (factor, x)), beta=_A)
    return x


def batches(matrices: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the places of matrices of one shape on one device."""
    alike: dict[object, list[int]] = {}
    for place, matrix in enumerate(matrices):
        alike.setdefault((matrix.device, matrix.shape), []).append(place)
    for places in alike.values():
        most = max(1, MOST_ENTRIES // max(1, matrices[places[0]].numel()))
        for start in range(0, len(places), most):
            yield places[start : start + most]
