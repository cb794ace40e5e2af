"""Sums and parts of sparse vectors, padded to a fixed length: no host needs a count."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradwire.kernels import topk
from gradwire.kernels.join import merge
from gradwire.types import Sparse


def add(a: Sparse, b: Sparse) -> Sparse:
    """a + b: at most as many entries as both have room for. At most two numbers meet in a sum."""
    if a.common:
        return replace(a, values=a.values + b.values)
    return add_all([a, b])


def add_all(parts: Sequence[Sparse]) -> Sparse:
    """The sum, added in the order of the parts; with room for the entries of all."""
    size = parts[0].size
    where = merge(torch.cat([part.indices for part in parts]), size)
    values = torch.zeros(where.numel() + 1, dtype=torch.float32, device=where.device)
    for part in parts:
        # Padding points behind the last entry; searchsorted finds some place, its value is zero.
        values.index_add_(0, torch.searchsorted(where, part.indices), part.values)
    return Sparse(where, values[:-1], (where < size).sum(dtype=torch.int32), size)


def subtract(a: Sparse, b: Sparse) -> Sparse:
    """a - b."""
    return add(a, replace(b, values=-b.values))


def keep(sparse: Sparse, k: int) -> Sparse:
    """The k entries of largest magnitude; ties go to the smaller index."""
    if sparse.common:
        return sparse
    places = topk(sparse.values, min(k, sparse.capacity))
    indices, values = sparse.indices[places], sparse.values[places]
    if missing := k - places.numel():
        indices = torch.cat([indices, indices.new_full((missing,), sparse.size)])
        values = torch.cat([values, values.new_zeros(missing)])
    return Sparse(indices, values, (indices < sparse.size).sum(dtype=torch.int32), sparse.size)


def restrict(sparse: Sparse, where: Tensor) -> Sparse:
    """The entries whose index is in `where`: ascending, padded with size, one at least."""
    at = torch.searchsorted(where, sparse.indices).clamp_(max=where.numel() - 1)
    inside = (where[at] == sparse.indices) & (sparse.indices < sparse.size)
    indices, order = torch.where(inside, sparse.indices, sparse.size).sort()
    values = torch.where(inside, sparse.values, 0)[order]
    return Sparse(indices, values, inside.sum(dtype=torch.int32), sparse.size)
