"""The reference of join: plain torch, any device, no host sync."""

import torch
from torch import Tensor


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
