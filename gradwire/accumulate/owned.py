"""Parts of a vector that ranks own, and the rounding that an owner keeps of its part of the mean.

An exchange with owners sends a mean in few bits. The owner adds the rounding to its next mean.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.encode.format import BLOCK
from gradwire.types import Memory, Slot

OWNED = "owned_rounding"
"""The key in memory of the rounding that this rank keeps, of the entries of its part."""


def part_length(size: int, ranks: int) -> int:
    """Return the entries of one part: whole blocks, and enough of them for `size` entries."""
    return BLOCK * -(-size // (BLOCK * ranks))


def by_part(flat: Tensor, ranks: int) -> Tensor:
    """Return the entries by part [ranks, length]; zeros behind the last one.

    Blocks of 256 entries are dealt out in turn.
    """
    length = part_length(flat.numel(), ranks)
    padded = flat.new_zeros(ranks * length)
    padded[: flat.numel()] = flat
    return padded.view(-1, ranks, BLOCK).transpose(0, 1).reshape(ranks, length)


def in_order(parts: Tensor, size: int) -> Tensor:
    """Return the `size` entries that `by_part` dealt out."""
    return parts.view(len(parts), -1, BLOCK).transpose(0, 1).reshape(-1)[:size]


def spread_part(part: Tensor, rank: int, ranks: int, size: int) -> Tensor:
    """Return the vector of `size` entries that is zero outside of a rank's part."""
    parts = part.new_zeros(ranks, part.numel())
    parts[rank] = part
    return in_order(parts, size)


def owned_places(memory: Memory, size: int, slots: Sequence[Slot], device: torch.device) -> Tensor:
    """Return True for each entry of this rank's part that lies in one of the slots."""
    places = torch.zeros(size, dtype=torch.bool, device=device)
    for slot in slots:
        places[slot.offset : slot.offset + slot.numel] = True
    # A view would keep the other parts too.
    return by_part(places, memory.ranks)[memory.rank].clone()
