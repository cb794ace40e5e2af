"""join: the union of the index lists of all ranks, and the entries of u at these indices."""

import torch
from torch import Tensor

from gradwire.kernels.dispatch import versions


def join(lists: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (indices, values, count): the distinct indices, ascending, and u at each index.

    count is 0-d int32. Indices and values have room for the smaller of size and the length of the
    lists. Behind `count` they are (size, 0).
    lists: flat int32, in 0 .. size; size is padding.
    """
    return _join_on(u.device)(lists, u)


def join_torch(lists: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `join` with torch ops."""
    indices = distinct_indices(lists, u.numel())
    real = indices < u.numel()
    values = torch.where(real, u.index_select(0, indices.clamp(max=u.numel() - 1)), 0)
    return indices, values, real.sum(dtype=torch.int32)


def distinct_indices(indices: Tensor, size: int) -> Tensor:
    """Return the distinct indices, ascending, then padding (= size).

    The result is as long as `indices`, but not longer than `size`.
    """
    room = min(size, indices.numel())
    ascending = indices.sort().values
    # Equal indices have the place of the first of them. Padding may need one place more than there
    # is room for, so `out` has a spare entry.
    place = (ascending[1:] != ascending[:-1]).cumsum(0)
    out = torch.full((room + 1,), size, dtype=torch.int32, device=indices.device)
    out[:1] = ascending[:1]
    return out.scatter_(0, place, ascending[1:])[:room]


_join_on = versions(join_torch, triton="gradwire.kernels.triton.join.join_triton")
