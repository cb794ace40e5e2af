"""join: the index lists of all ranks -> their union, and what u has there."""

import torch
from torch import Tensor

from gradwire.kernels.dispatch import versions


def join(lists: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(where, values, count): the distinct indices, ascending, and u at each; count is 0-d int32.

    lists: flat int32, in 0..size; size is padding. where and values have room for the smaller of
    size and the length of the lists; behind `count` they are (size, 0).
    """
    return _join_on(u.device)(lists, u)


def join_torch(lists: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `join`."""
    where = merge(lists, u.numel())
    real = where < u.numel()
    values = torch.where(real, u.index_select(0, where.clamp(max=u.numel() - 1)), 0)
    return where, values, real.sum(dtype=torch.int32)


def merge(indices: Tensor, size: int) -> Tensor:
    """The distinct indices, ascending, then padding (= size); as long as there is room for."""
    room = min(size, indices.numel())
    ascending = indices.sort().values
    # Repeated ones have the place of the first, and so has the padding, which may be one too many.
    place = (ascending[1:] != ascending[:-1]).cumsum(0)
    out = torch.full((room + 1,), size, dtype=torch.int32, device=indices.device)
    out[:1] = ascending[:1]
    return out.scatter_(0, place, ascending[1:])[:room]


_join_on = versions(join_torch, triton="gradwire.kernels.triton.join.join_triton")
