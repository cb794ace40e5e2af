"""mean_of_messages: the mean of the messages of all ranks, with the same bits on every rank."""

import torch
from torch import Tensor

from gradwire.kernels.dispatch import versions
from gradwire.kernels.scatter import reset_mean
from gradwire.kernels.side_stream import Target

HEADER = 32
"""Bytes of the header of a message."""
MANY = 1 << 18
"""Entries that are read together. More would take more memory, and save no time."""


def mean_of_messages(
    gathered: Tensor,
    own: Tensor,
    size: int,
    capacity: int,
    values: torch.dtype,
    common: Tensor | None = None,
    into: Target | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Return (mean, ok): fp32 [size + 1], the last entry spare, and True (0-d) if all are usable.

    The sum starts at zero and goes rank by rank. Each value is divided by the number of ranks
    before it is added. An index outside 0 .. size - 1 is skipped. If not ok, the mean is NaN
    everywhere.
    gathered: uint8 [ranks, bytes], the messages in rank order. Each has `capacity` ascending
    indices (none if `common` is given) and as many `values`.
    own: this rank's message. The header of each message must agree with it in every word but the
    count, and must say finite.
    into: the target of the mean. If it has pieces, None is returned in place of the mean.
    """
    version = _mean_of_messages_on(gathered.device)
    return version(gathered, own, size, capacity, values, common, into)


def mean_of_messages_torch(
    gathered: Tensor,
    own: Tensor,
    size: int,
    capacity: int,
    values: torch.dtype,
    common: Tensor | None = None,
    into: Target | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Compute `mean_of_messages` with torch ops."""
    words = gathered[:, :HEADER].contiguous().view(torch.int32)
    same = words == own[:HEADER].view(torch.int32)
    ok = same[:, :3].all() & same[:, 5:].all() & (words[:, 4] == 1).all()
    into = Target(size, gathered.device) if into is None else into
    out = into.out
    if out is None:
        out = torch.empty(size + 1, dtype=torch.float32, device=gathered.device)
    reset_mean(out, ok)
    # A tensor, not a number: CUDA multiplies by the reciprocal of a number.
    ranks = torch.full((), float(len(gathered)), dtype=torch.float32, device=gathered.device)
    split = HEADER + (4 * capacity if common is None else 0)
    together = max(1, MANY // max(1, capacity))
    for rows in gathered.split(together):
        indices = rows[:, HEADER:split].view(torch.int32) if common is None else common
        shares = rows[:, split : split + capacity * values.itemsize].view(values).float()
        inside = (indices >= 0) & (indices < size)
        shares = torch.where(inside, shares, 0) / ranks
        indices = torch.where(inside, indices, size).expand_as(shares)
        for rank_indices, rank_shares in zip(indices.unbind(), shares.unbind(), strict=True):
            out.index_add_(0, rank_indices, rank_shares)
    for place, piece in into.pieces:
        piece.copy_(out[place : place + piece.numel()])
    return into.out, ok


_mean_of_messages_on = versions(
    mean_of_messages_torch, triton="gradwire.kernels.triton.messages.mean_of_messages_triton"
)
