"""largest: the largest magnitudes inside every piece of a vector, so many of each."""

import itertools

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.kernels.dispatch import versions
from gradwire.kernels.select import above, array, exact, padded, topk, topk_cpu


def largest_in_pieces(
    u: Tensor, bounds: Tensor, wanted: Tensor, capacity: int, maxima: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """int32 indices, values and count (0-d int32) of the `wanted[i]` largest |u| of each piece i.

    Piece i is [bounds[i], bounds[i + 1]); bounds are multiples of `block`, but for the last, and
    cover u. Ascending, padded to `capacity` with (size, 0); ties go to the smaller index, zeros are
    not chosen. Where there are more, the `capacity` largest are taken; it is at least 1 where
    anything is wanted. wanted: at most what a piece has. u: flat and finite.
    maxima: max |u| of every `block` consecutive entries.
    """
    return _largest_in_pieces_on(u.device)(u, bounds, wanted, capacity, maxima, block)


def largest_in_pieces_cpu(
    u: Tensor, bounds: Tensor, wanted: Tensor, capacity: int, maxima: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `largest_in_pieces`."""
    found = [np.empty(0, np.int32)]
    pieces = zip(itertools.pairwise(bounds.tolist()), wanted.tolist(), strict=True)
    for (start, end), k in pieces:
        if k:
            blocks = maxima[start // block : -(-end // block)]
            found.append(topk_cpu(u[start:end], k, blocks, block).numpy() + start)
    where = np.concatenate(found)
    magnitude = np.abs(array(u)[where])
    where, magnitude = where[magnitude > 0], magnitude[magnitude > 0]
    if where.size > capacity:
        return padded(u, exact(where, magnitude, capacity), capacity)
    return padded(u, torch.from_numpy(where), capacity)


def largest_in_pieces_torch(
    u: Tensor, bounds: Tensor, wanted: Tensor, capacity: int, maxima: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `largest_in_pieces`. Those of a piece are among as many blocks of largest maximum."""
    rows, firsts = in_rows(u, block), -(-bounds // block)
    number = torch.arange(rows.shape[0], dtype=torch.int64, device=u.device)
    piece = torch.searchsorted(firsts, number, right=True) - 1
    chosen = _ranks(maxima, piece, firsts) < wanted[piece]
    blocks = topk(torch.where(chosen, maxima, 0), min(capacity, maxima.numel()))
    rest, owner = rows[blocks], piece[blocks]
    rest = torch.where(chosen[blocks, None], rest, 0).view(-1)
    owners = owner.repeat_interleave(block, output_size=rest.numel())
    pieces = torch.arange(bounds.numel(), dtype=torch.int64, device=u.device)
    begins = torch.searchsorted(owner, pieces) * block
    winners = _ranks(rest.abs(), owners, begins) < wanted[owners]
    nothing = torch.zeros((), dtype=torch.float32, device=u.device)
    found, values, count = above(torch.where(winners, rest, 0), nothing, capacity)
    inside = found.clamp(max=rest.numel() - 1)
    where = blocks[inside // block] * block + inside % block
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


_largest_in_pieces_on = versions(largest_in_pieces_torch, cpu=largest_in_pieces_cpu)
