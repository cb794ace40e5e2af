"""The mean of the messages of all ranks, the same bits everywhere."""

import torch
from torch import Tensor

from gradwire.kernels.dispatch import versions
from gradwire.kernels.scatter import start
from gradwire.kernels.side_stream import Target

HEADER = 32
MANY = 1 << 18
"""Entries that are read together: more take more memory, and no less time."""


def mean_of_messages(
    gathered: Tensor,
    own: Tensor,
    size: int,
    capacity: int,
    values: torch.dtype,
    common: Tensor | None = None,
    into: Target | None = None,
) -> tuple[Tensor | None, Tensor]:
    """(mean, ok): fp32 [size + 1], the last entry spare, and whether every message can be used.

    gathered: uint8 [ranks, bytes], the messages in rank order. own: this rank's message, whose
    header the others must match in every word but count, and in the finite flag where it is 1.
    Messages hold `capacity` ascending indices (none when `common` are given) and as many `values`.
    Added from zero rank by rank, each value divided by the number of ranks; an index outside
    0..size-1 is passed over. When not ok (0-d bool) the mean is NaN everywhere.
    into: where the mean goes; None in its place where that is into pieces.
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
    """See `mean_of_messages`."""
    words = gathered[:, :HEADER].contiguous().view(torch.int32)
    same = words == own[:HEADER].view(torch.int32)
    ok = same[:, :3].all() & same[:, 5:].all() & (words[:, 4] == 1).all()
    into = Target(size, gathered.device) if into is None else into
    out = into.out
    if out is None:
        out = torch.empty(size + 1, dtype=torch.float32, device=gathered.device)
    start(out, ok)
    # A tensor, not a number: CUDA multiplies by the reciprocal of a number.
    ranks = torch.full((), float(len(gathered)), dtype=torch.float32, device=gathered.device)
    split = HEADER + (4 * capacity if common is None else 0)
    together = max(1, MANY // max(1, capacity))
    for rows in gathered.split(together):
        indices = rows[:, HEADER:split].view(torch.int32) if common is None else common
        given = rows[:, split : split + capacity * values.itemsize].view(values).float()
        inside = (indices >= 0) & (indices < size)
        given = torch.where(inside, given, 0) / ranks
        where = torch.where(inside, indices, size).expand_as(given)
        for one, values_there in zip(where.unbind(), given.unbind(), strict=True):
            out.index_add_(0, one, values_there)
    for place, piece in into.pieces:
        piece.copy_(out[place : place + piece.numel()])
    return into.out, ok


_mean_of_messages_on = versions(
    mean_of_messages_torch, triton="gradwire.kernels.triton.messages.mean_of_messages_triton"
)
