"""Numbers of a few bits side by side, and sets of positions, in int32 words.

All functions are torch ops without a host sync. Row functions work on many messages at once.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def words_for(bits: int) -> int:
    """Return the number of 32-bit words that hold `bits` bits."""
    return -(-bits // 32)


def put_bits(numbers: Tensor, width: int) -> Tensor:
    """Return int32 words with the low `width` (0 to 31) bits of each number, side by side."""
    n = words_for(numbers.numel() * width)
    at = torch.arange(numbers.numel(), dtype=torch.int64, device=numbers.device) * width
    shifted = numbers.long() << (at & 31)
    # The bits of different numbers never overlap: adding sets them, in any order.
    words = torch.zeros(n + 1, dtype=torch.int64, device=numbers.device)
    words.index_add_(0, at >> 5, shifted & 0xFFFFFFFF)
    words.index_add_(0, (at >> 5) + 1 if n else at >> 5, shifted >> 32)
    return _signed(words[:n])


def get_bits(words: Tensor, count: int, width: int) -> Tensor:
    """Return the `count` numbers that `put_bits` stored, as int64; words may have many rows."""
    wide = pad(words.long() & 0xFFFFFFFF, (0, 2))
    at = torch.arange(count, dtype=torch.int64, device=words.device) * width
    low, high = wide[..., at >> 5], wide[..., (at >> 5) + 1]
    return ((low >> (at & 31)) | (high << (32 - (at & 31)))) & ((1 << width) - 1)


def put_positions(positions: Tensor, real: Tensor, bits: int) -> Tensor:
    """Return int32 words of `bits` bits with a bit set at each distinct position that is `real`."""
    words = torch.zeros(words_for(bits), dtype=torch.int64, device=positions.device)
    bit = torch.where(real, torch.ones_like(positions) << (positions & 31), 0)
    return _signed(words.index_add_(0, torch.where(real, positions >> 5, 0), bit))


def get_positions(words: Tensor, count: int, missing: int) -> Tensor:
    """Return the first `count` set positions of each row, ascending, int64.

    Entries without a set bit are `missing`.
    """
    shifts = torch.arange(32, dtype=torch.int64, device=words.device)
    bits = ((words.long().unsqueeze(-1) >> shifts) & 1).flatten(-2)
    # The spare last column takes the writes of clear bits and of bits after the first `count`.
    place = torch.where(bits == 1, bits.cumsum(-1) - 1, count).clamp_(max=count)
    out = words.new_full((*words.shape[:-1], count + 1), missing, dtype=torch.int64)
    order = torch.arange(bits.shape[-1], dtype=torch.int64, device=words.device)
    out.scatter_(-1, place, order.expand_as(place))
    return out[..., :count]


def _signed(words: Tensor) -> Tensor:
    """Return the low 32 bits as int32."""
    return ((words ^ 0x80000000) - 0x80000000).to(torch.int32)
