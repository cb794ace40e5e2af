"""The codes of values.

fp32, bf16, fp16   unchanged, or rounded.
int8, int4         blocks of 256 values share an fp32 scale: max |v| / 127 or max |v| / 7.
sign               one bit per value, 1 for a negative one. Blocks of 256 values share a scale, the
                   mean |v| without zeros. The mean is the number nearest to the values (scaled
                   sign of Karimireddy et al. 2019). The largest values lose most; the residual
                   keeps the loss.
two-bit            a bit for the sign and a bit for the size. Blocks of 256 values share two levels
                   in bf16: the mean of the small |v| and the mean of the large |v|. Lloyd's
                   algorithm finds the cut between them. The squared error of Gaussian values is
                   11.6 %, of Laplace values 17 %; fixed levels of one scale suit one of the two.

Rounding goes to the nearest number, ties to even. With `noise` it is stochastic: up with the
probability of the part that is cut off, in steps of 2^-16. The expected value is the value itself.
"""

import torch
from torch import Tensor

from gradwire.encode.format import BLOCK, FLOATS, LARGEST, LEVELS
from gradwire.encode.noise import Noise, random_words

FULL = 1 << 22
"""The largest |v| of a block as a whole number: sums of a block fit into int32 in any order."""
REFITS = 4
"""The times that the cut moves to the middle of the two levels."""


def put_values(name: str, values: Tensor, noise: Noise | None = None) -> Tensor:
    """Return the values as uint8."""
    if name in FLOATS:
        return _floats(FLOATS[name], values, noise).view(torch.uint8)
    blocks = _blocks(values.float())
    if name == "sign":
        return _signs(blocks, values.numel())
    if name == "two-bit":
        return _two_bits(blocks, values.numel())
    # Tensors, not numbers: CUDA multiplies by the reciprocal of a number.
    top_level = blocks.new_full((), LEVELS[name])
    scale = blocks.abs().amax(1).clamp(max=LARGEST) / top_level
    level = torch.where(scale > 0, scale, 1).reciprocal().unsqueeze(1) * blocks
    level = level.nan_to_num(0).view(-1)[: values.numel()]
    if noise is None:
        level = level.round()
    else:
        level = (level + (random_words(noise, values.numel()) >> 16).float() * 2.0**-16).floor()
    codes = level.clamp(-LEVELS[name], LEVELS[name]).to(torch.int8)
    if name == "int4":
        codes = _nibbles(codes)
    return torch.cat([scale.view(torch.uint8), codes.view(torch.uint8)])


def get_values(name: str, part: Tensor, capacity: int) -> Tensor:
    """Return the fp32 values that `put_values` stored, as every receiver sees them.

    part: uint8 [bytes], or [messages, bytes].
    """
    if name in FLOATS:
        return part.view(FLOATS[name]).float()
    split = 4 * -(-capacity // BLOCK)
    if name == "two-bit":
        return _of_two_bits(part[..., :split], part[..., split:], capacity)
    scale, codes = part[..., :split].view(torch.float32), part[..., split:]
    if name == "int4":
        nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
        numbers = nibbles[..., :capacity].float() - 8
    elif name == "sign":
        bits = (codes.unsqueeze(-1) >> _bit_numbers(codes)) & 1
        numbers = 1 - 2 * bits.flatten(-2)[..., :capacity].float()
    else:
        numbers = codes.view(torch.int8).float()
    return numbers * scale.repeat_interleave(BLOCK, -1)[..., :capacity]


def _floats(dtype: torch.dtype, values: Tensor, noise: Noise | None) -> Tensor:
    # A number above the largest of a dtype would round to infinity. The clamp keeps it finite, and
    # the residual keeps the difference.
    limit = torch.finfo(dtype).max
    values = values.float().clamp(-limit, limit)
    if noise is None:
        return values.to(dtype)
    # bf16 is the upper half of fp32. A random lower half that is added carries into the upper half
    # with the probability of the part that is cut off.
    words = values.view(torch.int32) + (random_words(noise, values.numel()) >> 16).int()
    return (words >> 16).to(torch.int16).view(torch.bfloat16)


def _blocks(values: Tensor) -> Tensor:
    n = -(-values.numel() // BLOCK)
    out = values.new_zeros(n * BLOCK)
    out[: values.numel()] = values
    return out.view(n, BLOCK)


def _nibbles(codes: Tensor) -> Tensor:
    """Return two codes per byte, the first one in the low half; each is stored with 8 added."""
    even = codes.new_full((-(-codes.numel() // 2) * 2,), 0)
    even[: codes.numel()] = codes
    low, high = (even + 8).view(-1, 2).unbind(1)
    return low.to(torch.uint8) | (high.to(torch.uint8) << 4)


def _signs(blocks: Tensor, count: int) -> Tensor:
    """Return the mean |v| of every block, and eight signs per byte, the first one lowest."""
    magnitude = blocks.nan_to_num(0, LARGEST, -LARGEST).abs()
    nonzero = (blocks != 0).sum(1).clamp(min=1)
    # Divided before the sum, because a sum of the largest numbers would be infinite.
    scale = (magnitude / nonzero.unsqueeze(1)).sum(1).clamp(max=LARGEST)
    bits = (blocks < 0).view(-1, 8).to(torch.uint8)
    codes = (bits << _bit_numbers(bits)).sum(1, dtype=torch.uint8)[: -(-count // 8)]
    return torch.cat([scale.view(torch.uint8), codes])


def _two_bits(blocks: Tensor, count: int) -> Tensor:
    """Return the two levels of every block, and four codes per byte, the first one lowest."""
    limit = torch.finfo(torch.bfloat16).max
    magnitude = blocks.nan_to_num(0, limit, -limit).abs().clamp(max=limit)
    largest = magnitude.amax(1)
    # Whole numbers, because the sums of every version of this code must have the same bits.
    share = magnitude / torch.where(largest > 0, largest, 1).unsqueeze(1)
    share = (share * FULL).to(torch.int32)
    first = BLOCK * torch.arange(len(blocks), dtype=torch.int64, device=blocks.device)
    values, total = (count - first).clamp(max=BLOCK), share.sum(1)
    cut = total // values
    cut += cut // 4
    for refit in range(REFITS + 1):
        is_large = share > cut.to(torch.int32).unsqueeze(1)
        large = is_large.sum(1)
        large_total = torch.where(is_large, share, 0).sum(1)
        small, small_total = values - large, total - large_total
        if refit < REFITS:
            top = torch.where(large > 0, large_total // large.clamp(min=1), FULL)
            cut = (small_total // small + top) // 2
    means = torch.stack([small_total, large_total]).float() / torch.stack([small, large]).float()
    # Nothing is above the cut where all values are of one size.
    levels = torch.where(means.isnan(), 0, means * (1 / FULL) * largest).to(torch.bfloat16)
    codes = (blocks < 0).to(torch.uint8) | (is_large.to(torch.uint8) << 1)
    codes = (codes.view(-1, 4) << _pair_places(codes)).sum(1, dtype=torch.uint8)[: -(-count // 4)]
    return torch.cat([levels.t().contiguous().view(-1).view(torch.uint8), codes])


def _of_two_bits(levels: Tensor, codes: Tensor, capacity: int) -> Tensor:
    """Return the values of `capacity` codes."""
    pairs = (codes.unsqueeze(-1) >> _pair_places(codes)) & 3
    pairs = pairs.flatten(-2)[..., :capacity]
    levels = levels.view(torch.bfloat16).float().unflatten(-1, (-1, 2))
    low, high = (level.repeat_interleave(BLOCK, -1)[..., :capacity] for level in levels.unbind(-1))
    level = torch.where(pairs >= 2, high, low)
    return torch.where(pairs % 2 == 1, -level, level)


def _pair_places(like: Tensor) -> Tensor:
    return torch.arange(0, 8, 2, dtype=torch.uint8, device=like.device)


def _bit_numbers(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
