"""largest on the CPU: piece by piece, each as topk does it."""

import itertools

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.topk_cpu import array, exact, padded, topk_cpu


def largest_cpu(
    u: Tensor, bounds: Tensor, wanted: Tensor, capacity: int, maxima: Tensor, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `largest`."""
    found = [np.empty(0, np.int32)]
    pieces = zip(itertools.pairwise(bounds.tolist()), wanted.tolist(), strict=True)
    for (start, end), k in pieces:
        if k:
            groups = maxima[start // group : -(-end // group)]
            found.append(topk_cpu(u[start:end], k, groups, group).numpy() + start)
    where = np.concatenate(found)
    magnitude = np.abs(array(u)[where])
    where, magnitude = where[magnitude > 0], magnitude[magnitude > 0]
    if where.size > capacity:
        return padded(u, exact(where, magnitude, capacity), capacity)
    return padded(u, torch.from_numpy(where), capacity)
