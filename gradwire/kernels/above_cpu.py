"""above on the CPU: groups whose maximum does not pass are never read."""

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.topk_cpu import array, candidates, exact, padded, topk_cpu


def above_cpu(
    u: Tensor, threshold: Tensor, capacity: int, maxima: Tensor | None = None, group: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """See `above`."""
    return padded(u, _chosen(u, threshold, capacity, maxima, group), capacity)


def _chosen(
    u: Tensor, threshold: Tensor, capacity: int, maxima: Tensor | None, group: int
) -> Tensor:
    # A Python number would be rounded to fp16 for an fp16 vector, a numpy one is not.
    entries, bound = array(u), np.float32(threshold)
    if not capacity:
        return torch.empty(0, dtype=torch.int32)
    if maxima is None:
        magnitude = np.abs(entries)
        where = np.flatnonzero(magnitude > bound)
        magnitude = magnitude[where]
    else:
        groups = np.flatnonzero(array(maxima) > bound)
        if groups.size > capacity:  # so do their entries, and nearly all may pass
            return topk_cpu(u, capacity, maxima, group)
        where, magnitude = candidates(entries, groups, group, bound, np.greater)
    if where.size > capacity:
        return exact(where, magnitude, capacity)
    return torch.from_numpy(where.astype(np.int32))
