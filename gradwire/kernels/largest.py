"""largest_in_pieces: choose a given number of the largest magnitudes in each piece of a vector."""

import itertools

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.kernels.dispatch import versions
from gradwire.kernels.select import above, as_numpy, k_largest_of, pad_entries, topk, topk_cpu


def largest_in_pieces(
    u: Tensor, bounds: Tensor, wanted: Tensor, capacity: int, maxima: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `wanted[i]` largest |u| of each piece i: int32 indices, values and count.

    Indices are ascending, and padded to `capacity` with (size, 0). count is 0-d int32. Ties go to
    the smaller index, and zeros are not chosen. If more are wanted than `capacity`, the `capacity`
    largest are taken.
    u: flat and finite. bounds: piece i is [bounds[i], bounds[i + 1]). All bounds but the last are
    multiples of `block`, and the pieces cover u.
    wanted: at most the entries of the piece. capacity: at least 1 if anything is wanted.
    maxima: max |u| of every `block` consecutive entries.
    """
    return _largest_in_pieces_on(u.device)(u, bounds, wanted, capacity, maxima, block)


def largest_in_pieces_cpu(
    u: Tensor, bounds: Tensor, wanted: Tensor, capacity: int, maxima: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `largest_in_pieces` with numpy, one piece after the other."""
    parts = [np.empty(0, np.int32)]
    pieces = zip(itertools.pairwise(bounds.tolist()), wanted.tolist(), strict=True)
    for (start, end), k in pieces:
        if k:
            blocks = maxima[start // block : -(-end // block)]
            parts.append(topk_cpu(u[start:end], k, blocks, block).numpy() + start)
    indices = np.concatenate(parts)
    magnitude = np.abs(as_numpy(u)[indices])
    indices, magnitude = indices[magnitude > 0], magnitude[magnitude > 0]
    if indices.size > capacity:
        return pad_entries(u, k_largest_of(indices, magnitude, capacity), capacity)
    return pad_entries(u, torch.from_numpy(indices), capacity)


def largest_in_pieces_torch(
    u: Tensor, bounds: Tensor, wanted: Tensor, capacity: int, maxima: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `largest_in_pieces` with torch ops.

    The n winners of a piece lie in its n blocks of largest maximum. Only these blocks are ranked.
    """
    rows, firsts = in_rows(u, block), -(-bounds // block)
    number = torch.arange(rows.shape[0], dtype=torch.int64, device=u.device)
    piece = torch.searchsorted(firsts, number, right=True) - 1
    chosen = _ranks(maxima, piece, firsts) < wanted[piece]
    blocks = topk(torch.where(chosen, maxima, 0), min(capacity, maxima.numel()))
    entries, owner = rows[blocks], piece[blocks]
    entries = torch.where(chosen[blocks, None], entries, 0).view(-1)
    owners = owner.repeat_interleave(block, output_size=entries.numel())
    pieces = torch.arange(bounds.numel(), dtype=torch.int64, device=u.device)
    begins = torch.searchsorted(owner, pieces) * block
    winners = _ranks(entries.abs(), owners, begins) < wanted[owners]
    nothing = torch.zeros((), dtype=torch.float32, device=u.device)
    places, values, count = above(torch.where(winners, entries, 0), nothing, capacity)
    inside = places.clamp(max=entries.numel() - 1)
    indices = blocks[inside // block] * block + inside % block
    return torch.where(places < entries.numel(), indices, u.numel()), values, count


def in_rows(u: Tensor, length: int) -> Tensor:
    """Return u in rows of `length` entries, the last row filled up with zeros."""
    missing = -u.numel() % length
    return (pad(u, (0, missing)) if missing else u).view(-1, length)


def _ranks(magnitude: Tensor, piece: Tensor, firsts: Tensor) -> Tensor:
    """Return the rank of each entry in its piece by falling magnitude, ties by index.

    piece: the piece of each entry, ascending. firsts: the first entry of each piece.
    """
    # The bits of positive floats sort as the floats do.
    bits = magnitude.float().view(torch.int32).long()
    order = (piece * 2**32 - bits).sort(stable=True).indices
    place = torch.arange(order.numel(), dtype=torch.int64, device=order.device) - firsts[piece]
    return torch.empty_like(order).scatter_(0, order, place)


_largest_in_pieces_on = versions(largest_in_pieces_torch, cpu=largest_in_pieces_cpu)
