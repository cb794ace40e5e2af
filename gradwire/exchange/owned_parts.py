"""Entries of one rank, cut into the parts that ranks own."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradwire.accumulate.owned import by_part, in_order
from gradwire.encode.format import BLOCK
from gradwire.types import Sparse


def part_capacity(k: int, size: int, length: int, room: float) -> int:
    """Return the entries that one rank sends to one owner at most."""
    return min(k, length, int(-(-room * k * length // size)))


@dataclass(frozen=True)
class OwnedParts:
    """Entries of one rank, cut into parts.

    each: the entries of each part, by their place in the part.
    joined: from the values that owners see, the entries of all parts as one Sparse.
    """

    each: list[Sparse]
    joined: Callable[[list[Tensor]], Sparse]


def cut_into_parts(
    chosen: Sparse, ranks: int, length: int, capacity: int, step: Tensor
) -> OwnedParts:
    """Return the entries by part, at most `capacity` of each part."""
    if chosen.common and chosen.capacity == chosen.size:
        return _cut_everything(chosen, ranks, length)
    spare, device = ranks * length, chosen.indices.device
    block, real = chosen.indices.long() // BLOCK, chosen.indices < chosen.size
    part, place = block % ranks, block // ranks * BLOCK + chosen.indices % BLOCK
    cell = torch.where(real, part * length + place, spare)
    is_chosen = torch.zeros(spare + 1, dtype=torch.int32, device=device).index_fill_(0, cell, 1)
    order = is_chosen[:spare].view(ranks, length).cumsum(1, dtype=torch.int32)
    counts = order[:, -1].long()
    fits = counts.clamp(max=capacity)
    # Of more entries than fit, a run is sent that goes on at the first one behind the last.
    begin = torch.where(counts > capacity, step * capacity % counts.clamp(min=1), 0)
    around = (begin + fits - counts).clamp(min=0)
    number = order.view(-1)[cell.clamp(max=spare - 1)] - 1
    slot = torch.where(number < around[part], number, number - begin[part] + around[part])
    sent = (number < around[part]) | (number >= begin[part])
    sent &= real & (slot < fits[part])
    # The spare last slot takes the entries that are not sent.
    slot = torch.where(sent, part * capacity + slot, ranks * capacity)
    indices = chosen.indices.new_full((ranks * capacity + 1,), length)
    values = chosen.values.new_zeros(ranks * capacity + 1)
    indices.scatter_(0, slot, torch.where(sent, place, length).to(torch.int32))
    values.scatter_(0, slot, torch.where(sent, chosen.values, 0))
    rows = indices[:-1].view(ranks, capacity), values[:-1].view(ranks, capacity)
    each = [
        Sparse(i, v, count, length, chosen.common)
        for i, v, count in zip(*rows, fits.to(torch.int32), strict=True)
    ]

    def joined(seen: list[Tensor]) -> Sparse:
        flat = torch.cat([*seen, seen[0].new_zeros(1)])
        end = torch.where(sent, sent.cumsum(0) - 1, chosen.capacity)
        indices = chosen.indices.new_full((chosen.capacity + 1,), chosen.size)
        indices.scatter_(0, end, torch.where(sent, chosen.indices, chosen.size))
        values = flat.new_zeros(chosen.capacity + 1).scatter_(0, end, flat[slot])
        count = sent.sum(dtype=torch.int32)
        return replace(chosen, indices=indices[:-1], values=values[:-1], count=count)

    return OwnedParts(each, joined)


def _cut_everything(chosen: Sparse, ranks: int, length: int) -> OwnedParts:
    """Return all entries by part; no index travels."""
    values = by_part(chosen.values, ranks)
    # Places behind the last entry are padding.
    numbers = by_part(chosen.indices + 1, ranks)
    places = torch.arange(length, dtype=torch.int32, device=values.device)
    indices = torch.where(numbers > 0, places, length)
    counts = (numbers > 0).sum(1, dtype=torch.int32)
    each = [Sparse(i, v, n, length, True) for i, v, n in zip(indices, values, counts, strict=True)]

    def joined(seen: list[Tensor]) -> Sparse:
        return replace(chosen, values=in_order(torch.stack(seen), chosen.size))

    return OwnedParts(each, joined)
