"""The codes of indices. Each has a fixed length for (size, capacity), so buffers stay equal.

int32   4 bytes per index.
packed  Elias-Fano. Each index is cut into l = floor(log2(size / capacity)) low bits and a high
        part. The low bits stand side by side. For the high part h of the i-th index, bit h + i is
        set. That takes l + 1 bits per index, and size / 2^l bits more. At density 0.1 % it is 11.95
        bits per index, where the entropy is 11.4.
bitmap  one bit per entry of the vector; smaller than packed above density 1/4.
local16 2 bytes per index, its place in a block of 65,536 entries. 4 bytes per block: the number of
        indices below the end of the block. Receivers shift nothing, and search only for the block.
common  nothing: every rank knows the indices.
"""

import torch
from torch import Tensor

from gradwire.encode.bits import get_bits, get_positions, put_bits, put_positions
from gradwire.encode.format import LOCAL, low_bits, word_parts


def put_indices(name: str, indices: Tensor, size: int) -> Tensor:
    """Return the indices as uint8, padding (= size) included."""
    if name == "int32" or not indices.numel():
        return indices.view(torch.uint8)
    positions, real = indices.long(), indices < size
    if name == "bitmap":
        return put_positions(positions, real, size).view(torch.uint8)
    return (_put_local if name == "local16" else _put_packed)(positions, size).view(torch.uint8)


def get_indices(name: str, part: Tensor, size: int, capacity: int) -> Tensor:
    """Return the int32 indices that `put_indices` stored.

    An index outside 0 .. size - 1 becomes padding (= size).
    part: uint8 [bytes], or [messages, bytes].
    """
    words = part.view(torch.int32)
    if name == "int32" or not capacity:
        indices = words
    elif name == "bitmap":
        indices = get_positions(words, capacity, size)
    else:
        indices = (_get_local if name == "local16" else _get_packed)(words, size, capacity)
    inside = (indices >= 0) & (indices < size)
    return torch.where(inside, indices, size).to(torch.int32)


def _put_packed(indices: Tensor, size: int) -> Tensor:
    capacity = indices.numel()
    low = low_bits(size, capacity)
    _, words = word_parts("packed", size, capacity)
    at = (indices >> low) + torch.arange(capacity, dtype=torch.int64, device=indices.device)
    high = put_positions(at, torch.ones_like(at, dtype=torch.bool), 32 * words)
    return torch.cat([put_bits(indices & ((1 << low) - 1), low), high])


def _get_packed(words: Tensor, size: int, capacity: int) -> Tensor:
    low = low_bits(size, capacity)
    split, _ = word_parts("packed", size, capacity)
    # An entry without a bit is at -1. It stays below zero, which is outside.
    order = torch.arange(capacity, dtype=torch.int64, device=words.device)
    high = get_positions(words[..., split:], capacity, -1) - order
    return (high << low) | get_bits(words[..., :split], capacity, low)


def _put_local(indices: Tensor, size: int) -> Tensor:
    blocks, words = word_parts("local16", size, indices.numel())
    ends = (torch.arange(blocks, dtype=torch.int64, device=indices.device) + 1) * LOCAL
    below = torch.searchsorted(indices, ends.clamp(max=size), out_int32=True)
    places = indices.new_zeros(2 * words, dtype=torch.int16)
    places[: indices.numel()] = torch.where(indices < size, indices, 0)
    return torch.cat([below, places.view(torch.int32)])


def _get_local(words: Tensor, size: int, capacity: int) -> Tensor:
    blocks, _ = word_parts("local16", size, capacity)
    order = torch.arange(capacity, dtype=torch.int32, device=words.device)
    order = order.expand(*words.shape[:-1], -1).contiguous()
    block = torch.searchsorted(words[..., :blocks].contiguous(), order, right=True)
    place = words[..., blocks:].view(torch.int16)[..., :capacity].long() & (LOCAL - 1)
    return torch.where(block < blocks, block * LOCAL + place, size)
