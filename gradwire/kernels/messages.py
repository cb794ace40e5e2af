"""mean_of_messages: the mean of the messages of all ranks, with the same bits on every rank."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.dispatch import versions
from gradwire.kernels.pieces import Piece
from gradwire.kernels.scatter import reset_mean
from gradwire.kernels.side_stream import Target

HEADER = 32
"""Bytes of the header of a message."""
MANY = 1 << 18
"""Entries that are read together. More would take more memory, and save no time."""

_FINITE = (1).to_bytes(4, "little")

DIRECT = 1 << 12
"""Entries per piece and rank from which on the CPU adds to the pieces without a vector between."""


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


def mean_of_messages_cpu(
    gathered: Tensor,
    own: Tensor,
    size: int,
    capacity: int,
    values: torch.dtype,
    common: Tensor | None = None,
    into: Target | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Compute `mean_of_messages` with few ops, because each takes longer than its few entries."""
    into = Target(size, gathered.device) if into is None else into
    ranks = len(gathered)
    parts = _parts_of(into, size, ranks)
    ok = _is_usable(gathered, own)
    for _, part in parts:
        part.fill_(0 if ok else float("nan"))
    split = HEADER + (4 * capacity if common is None else 0)
    for rows in gathered.split(max(1, MANY // max(1, capacity))) if ok else ():
        shares = rows[:, split : split + capacity * values.itemsize].view(values).float() / ranks
        indices = common if common is not None else rows[:, HEADER:split].view(torch.int32)
        indices = indices.expand_as(shares)
        if len(parts) == 1 and parts[0][1].numel() >= size:
            # In the order of the rows, as if rank by rank.
            _add(parts[0][1], indices.reshape(-1), shares.reshape(-1), size)
            continue
        for places, rank_shares in zip(indices, shares, strict=True):
            _add_to_parts(parts, places, rank_shares, size)
    if into.out is None and parts[0][1] is not into.pieces[0][1]:
        into.put(parts[0][1])
    return into.out, torch.tensor(ok, dtype=torch.bool)


def _parts_of(into: Target, size: int, ranks: int) -> Sequence[Piece]:
    """Return the pieces, or one vector where adding to each piece would take longer."""
    if into.out is not None:
        return [(0, into.out)]
    if size < DIRECT * ranks * len(into.pieces):
        return [(0, torch.empty(size + 1, dtype=torch.float32))]
    return into.pieces


def _is_usable(gathered: Tensor, own: Tensor) -> bool:
    """Return True if all headers agree with `own` in every word but the count, and are finite."""
    header = own[:HEADER].numpy().tobytes()
    # Words 3 and 4 are the count and "finite".
    for row in gathered[:, :HEADER].numpy():
        words = row.tobytes()
        if words[:12] != header[:12] or words[16:] != _FINITE + header[20:]:
            return False
    return True


def _add(out: Tensor, indices: Tensor, shares: Tensor, size: int) -> None:
    """Add the shares whose index is in 0 .. size - 1, one after the other."""
    places, shares = _inside(indices, shares, size)
    out.index_add_(0, torch.from_numpy(places), shares)


def _inside(indices: Tensor, shares: Tensor, size: int) -> tuple[np.ndarray, Tensor]:
    """Return the indices that are in 0 .. size - 1, and their shares."""
    places = indices.numpy()
    # As unsigned numbers, negative indices are too large too.
    inside = places.view(np.uint32) < size
    if inside.all():
        return places, shares
    return places[inside], shares[torch.from_numpy(inside)]


def _add_to_parts(parts: Sequence[Piece], indices: Tensor, shares: Tensor, size: int) -> None:
    """Add the shares whose index is in 0 .. size - 1 to the parts that cover these indices."""
    places, shares = _inside(indices, shares, size)
    if (places[1:] < places[:-1]).any():
        order = np.argsort(places, kind="stable")
        places, shares = places[order], shares[torch.from_numpy(order)]
    edges = [edge for place, part in parts for edge in (place, place + part.numel())]
    cuts = iter(np.searchsorted(places, np.array(edges, places.dtype)).tolist())
    for (place, part), first, end in zip(parts, cuts, cuts, strict=True):
        part.index_add_(0, torch.from_numpy(places[first:end] - place), shares[first:end])


_mean_of_messages_on = versions(
    mean_of_messages_torch,
    cpu=mean_of_messages_cpu,
    triton="gradwire.kernels.triton.messages.mean_of_messages_triton",
)
