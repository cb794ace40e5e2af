"""The quality of a selection beside the exact top k of the same vector."""

import torch
from torch import Tensor

from gradwire.types import Delivered, Entries


def selection_quality(
    chosen: Delivered | None, u: Tensor, k: int
) -> tuple[float | None, float | None]:
    """Return (energy, recall) of a selection from u; (None, None) if everything was sent.

    energy: the energy of the chosen entries / that of the k largest. recall: the share of the k
    largest that was chosen. A tie at the k-th magnitude counts as one of the k largest, because
    each such entry belongs to some exact top k.
    """
    if not isinstance(chosen, Entries):
        return None, None
    magnitudes = u.abs()
    largest = torch.topk(magnitudes, k, sorted=False).values
    indices = chosen.sparse.indices
    # Padding points past the end.
    indices = indices[indices < u.numel()].long()
    kept = magnitudes[indices]
    hits = min(k, int((kept >= largest.min()).sum()))
    whole = float(largest.double().square().sum())
    energy = float(kept.double().square().sum()) / whole if whole else 1.0
    return round(energy, 4), round(hits / k, 4)
