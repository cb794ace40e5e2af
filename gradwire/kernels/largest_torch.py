"""The reference of largest: plain torch, any device, no host sync."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.kernels.above import above
from gradwire.kernels.topk import topk


def largest_torch(
    u: Tensor, bounds: Tensor, wanted: Tensor, capacity: int, maxima: Tensor, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `largest`. Those of a piece are among as many groups of largest maximum."""
    rows, firsts = in_rows(u, group), -(-bounds // group)
    number = torch.arange(rows.shape[0], dtype=torch.int64, device=u.device)
    piece = torch.searchsorted(firsts, number, right=True) - 1
    chosen = _ranks(maxima, piece, firsts) < wanted[piece]
    groups = topk(torch.where(chosen, maxima, 0), min(capacity, maxima.numel()))
    rest, owner = rows[groups], piece[groups]
    rest = torch.where(chosen[groups, None], rest, 0).view(-1)
    owners = owner.repeat_interleave(group, output_size=rest.numel())
    pieces = torch.arange(bounds.numel(), dtype=torch.int64, device=u.device)
    begins = torch.searchsorted(owner, pieces) * group
    winners = _ranks(rest.abs(), owners, begins) < wanted[owners]
    nothing = torch.zeros((), dtype=torch.float32, device=u.device)
    found, values, count = above(torch.where(winners, rest, 0), nothing, capacity)
    inside = found.clamp(max=rest.numel() - 1)
    where = groups[inside // group] * group + inside % group
    return torch.where(found < rest.numel(), where, u.numel()), values, count


def in_rows(u: Tensor, length: int) -> Tensor:
    """u in rows of so many entries, the last one filled up with zeros."""
    missing = -u.numel() % length
    return (pad(u, (0, missing)) if missing else u).view(-1, length)


def _ranks(magnitude: Tensor, piece: Tensor, firsts: Tensor) -> Tensor:
    """The place of each entry in its piece by falling magnitude; ties go to the smaller index.

    piece: ascending. firsts: where each piece begins. The bits of a positive float rise as it does.
    """
    bits = magnitude.float().view(torch.int32).long()
    order = (piece * 2**32 - bits).sort(stable=True).indices
    place = torch.arange(order.numel(), dtype=torch.int64, device=order.device) - firsts[piece]
    return torch.empty_like(order).scatter_(0, order, place)
