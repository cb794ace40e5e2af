"""How indices travel. Every code has a fixed length for (size, capacity), so buffers stay equal.

int32   4 bytes an index.
packed  Elias-Fano: the low l = floor(log2(size / capacity)) bits of each index side by side, and
        for the high parts one bit at position high + i for the i-th index. l + 1 bits an index and
        size / 2^l more: 11.95 bits at density 0.1 %, where the entropy is 11.4.
bitmap  one bit an entry of the vector; smaller than packed above density 1/4.
common  nothing: every rank knows them.
"""

import torch
from torch import Tensor

from gradwire.encode.bits import get_bits, get_positions, put_bits, put_positions, words_for

INDICES = {"int32": 0, "common": 1, "packed": 2, "bitmap": 3}
"""Names and codes in the header."""


def index_bytes(name: str, size: int, capacity: int) -> int:
    """Bytes that `capacity` ascending indices below `size` take."""
    if name == "common" or capacity == 0:
        return 0
    if name == "int32":
        return 4 * capacity
    if name == "bitmap":
        return 4 * words_for(size)
    low = low_bits(size, capacity)
    return 4 * (words_for(capacity * low) + words_for(_high_bits(size, capacity, low)))


def smallest(size: int, capacity: int) -> str:
    """The code that takes the fewest bytes."""
    return min(("packed", "bitmap", "int32"), key=lambda n: index_bytes(n, size, capacity))


def put_indices(name: str, indices: Tensor, size: int) -> Tensor:
    """The indices as uint8; padding (= size) included."""
    if name == "int32" or not indices.numel():
        return indices.view(torch.uint8)
    where, real = indices.long(), indices < size
    if name == "bitmap":
        return put_positions(where, real, size).view(torch.uint8)
    capacity = indices.numel()
    low = low_bits(size, capacity)
    order = torch.arange(capacity, device=indices.device)
    high = put_positions(
        (where >> low) + order, torch.ones_like(real), _high_bits(size, capacity, low)
    )
    return torch.cat([put_bits(where & ((1 << low) - 1), low), high]).view(torch.uint8)


def get_indices(name: str, part: Tensor, size: int, capacity: int) -> Tensor:
    """The int32 indices that `put_indices` stored; what points outside becomes padding (= size)."""
    words = part.view(torch.int32)
    if name == "int32" or not capacity:
        where = words
    elif name == "bitmap":
        where = get_positions(words, capacity, size)
    else:
        low = low_bits(size, capacity)
        split = words_for(capacity * low)
        order = torch.arange(capacity, device=part.device)
        high = get_positions(words[split:], capacity, size) - order
        where = (high << low) | get_bits(words[:split], capacity, low)
    inside = (where >= 0) & (where < size)
    return torch.where(inside, where, size).to(torch.int32)


def low_bits(size: int, capacity: int) -> int:
    """Bits of an index that are stored as they are: the entropy is lowest near log2(size / k)."""
    return max(0, (size // max(1, capacity)).bit_length() - 1)


def _high_bits(size: int, capacity: int, low: int) -> int:
    return capacity + (size >> low) + 1
