"""How indices travel. Every code has a fixed length for (size, capacity), so buffers stay equal.

int32   4 bytes an index.
packed  Elias-Fano: the low l = floor(log2(size / capacity)) bits of each index side by side, and
        for the high parts one bit at position high + i for the i-th index. l + 1 bits an index and
        size / 2^l more: 11.95 bits at density 0.1 %, where the entropy is 11.4.
bitmap  one bit an entry of the vector; smaller than packed above density 1/4.
local16 2 bytes an index, its place in a block of 65,536 entries, and 4 bytes a block: how many
        indices are below its end. Nothing to shift, nothing to search for but the block.
common  nothing: every rank knows them.
"""

import torch
from torch import Tensor

from gradwire.encode.bits import get_bits, get_positions, put_bits, put_positions
from gradwire.encode.format import LOCAL, low_bits, word_parts


def put_indices(name: str, indices: Tensor, size: int) -> Tensor:
    """The indices as uint8; padding (= size) included."""
    if name == "int32" or not indices.numel():
        return indices.view(torch.uint8)
    where, real = indices.long(), indices < size
    if name == "bitmap":
        return put_positions(where, real, size).view(torch.uint8)
    return (_put_local if name == "local16" else _put_packed)(where, size).view(torch.uint8)


def get_indices(name: str, part: Tensor, size: int, capacity: int) -> Tensor:
    """The int32 indices that `put_indices` stored; what points outside becomes padding (= size).

    part: uint8 [bytes], or [messages, bytes].
    """
    words = part.view(torch.int32)
    if name == "int32" or not capacity:
        where = words
    elif name == "bitmap":
        where = get_positions(words, capacity, size)
    else:
        where = (_get_local if name == "local16" else _get_packed)(words, size, capacity)
    inside = (where >= 0) & (where < size)
    return torch.where(inside, where, size).to(torch.int32)


def _put_packed(where: Tensor, size: int) -> Tensor:
    capacity = where.numel()
    low = low_bits(size, capacity)
    _, words = word_parts("packed", size, capacity)
    at = (where >> low) + torch.arange(capacity, dtype=torch.int64, device=where.device)
    high = put_positions(at, torch.ones_like(at, dtype=torch.bool), 32 * words)
    return torch.cat([put_bits(where & ((1 << low) - 1), low), high])


def _get_packed(words: Tensor, size: int, capacity: int) -> Tensor:
    low = low_bits(size, capacity)
    split, _ = word_parts("packed", size, capacity)
    # What has no bit is at -1, and stays below zero: outside.
    order = torch.arange(capacity, dtype=torch.int64, device=words.device)
    high = get_positions(words[..., split:], capacity, -1) - order
    return (high << low) | get_bits(words[..., :split], capacity, low)


def _put_local(where: Tensor, size: int) -> Tensor:
    blocks, words = word_parts("local16", size, where.numel())
    ends = (torch.arange(blocks, dtype=torch.int64, device=where.device) + 1) * LOCAL
    below = torch.searchsorted(where, ends.clamp(max=size), out_int32=True)
    places = where.new_zeros(2 * words, dtype=torch.int16)
    places[: where.numel()] = torch.where(where < size, where, 0)
    return torch.cat([below, places.view(torch.int32)])


def _get_local(words: Tensor, size: int, capacity: int) -> Tensor:
    blocks, _ = word_parts("local16", size, capacity)
    order = torch.arange(capacity, dtype=torch.int32, device=words.device)
    order = order.expand(*words.shape[:-1], -1).contiguous()
    block = torch.searchsorted(words[..., :blocks].contiguous(), order, right=True)
    place = words[..., blocks:].view(torch.int16)[..., :capacity].long() & (LOCAL - 1)
    return torch.where(block < blocks, block * LOCAL + place, size)
