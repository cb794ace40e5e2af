"""How good a choice is, against the exact top k of the same vector."""

import torch
from torch import Tensor

from gradwire.types import Delivered, Entries


def quality(chosen: Delivered | None, u: Tensor, k: int) -> tuple[float | None, float | None]:
    """(energy, recall) of a choice from u: over the energy of the k largest, and among them.

    Ties at the k-th magnitude count as found: any of them belongs to some exact top k.
    """
    if not isinstance(chosen, Entries):
        return None, None
    magnitudes = u.abs()
    largest = torch.topk(magnitudes, k, sorted=False).values
    indices = chosen.sparse.indices
    indices = indices[indices < u.numel()].long()
    kept = magnitudes[indices]
    found = min(k, int((kept >= largest.min()).sum()))
    whole = float(largest.double().square().sum())
    energy = float(kept.double().square().sum()) / whole if whole else 1.0
    return round(energy, 4), round(found / k, 4)
