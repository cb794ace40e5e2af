"""Sums and parts of sparse vectors, padded to a fixed length, so that no host needs a count."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradwire.kernels import topk
from gradwire.kernels.join import distinct_indices
from gradwire.types import Sparse


def add_sparse(a: Sparse, b: Sparse) -> Sparse:
    """Return a + b, with room for the entries of both. A sum adds at most two numbers."""
    if a.common:
        return replace(a, values=a.values + b.values)
    return sum_sparse([a, b])


def sum_sparse(parts: Sequence[Sparse]) -> Sparse:
    """Return the sum, added in the order of the parts, with room for the entries of all."""
    size = parts[0].size
    indices = distinct_indices(torch.cat([part.indices for part in parts]), size)
    values = torch.zeros(indices.numel() + 1, dtype=torch.float32, device=indices.device)
    for part in parts:
        # Padding points behind the last entry. searchsorted gives it any place; its value is zero.
        values.index_add_(0, torch.searchsorted(indices, part.indices), part.values)
    return Sparse(indices, values[:-1], (indices < size).sum(dtype=torch.int32), size)


def subtract_sparse(a: Sparse, b: Sparse) -> Sparse:
    """Return a - b."""
    return add_sparse(a, replace(b, values=-b.values))


def keep_largest(sparse: Sparse, k: int) -> Sparse:
    """Return the k entries of largest magnitude; ties go to the smaller index."""
    if sparse.common:
        return sparse
    places = topk(sparse.values, min(k, sparse.capacity))
    indices, values = sparse.indices[places], sparse.values[places]
    if missing := k - places.numel():
        indices = torch.cat([indices, indices.new_full((missing,), sparse.size)])
        values = torch.cat([values, values.new_zeros(missing)])
    return Sparse(indices, values, (indices < sparse.size).sum(dtype=torch.int32), sparse.size)


def restrict_to(sparse: Sparse, wanted: Tensor) -> Sparse:
    """Return the entries whose index is in `wanted`: ascending, padded with size, one at least."""
    places = torch.searchsorted(wanted, sparse.indices).clamp_(max=wanted.numel() - 1)
    inside = (wanted[places] == sparse.indices) & (sparse.indices < sparse.size)
    indices, order = torch.where(inside, sparse.indices, sparse.size).sort()
    values = torch.where(inside, sparse.values, 0)[order]
    return Sparse(indices, values, inside.sum(dtype=torch.int32), sparse.size)
