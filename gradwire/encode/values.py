"""The codes of values.

fp32, bf16, fp16   unchanged, or rounded.
int8, int4         blocks of 256 values share an fp32 scale: max |v| / 127 or max |v| / 7.
sign               one bit per value, 1 for a negative one. Blocks of 256 values share a scale, the
                   mean |v| without zeros. The mean is the number nearest to the values (scaled
                   sign of Karimireddy et al. 2019). The largest values lose most; the residual
                   keeps the loss.

Rounding goes to the nearest number, ties to even. With `noise` it is stochastic: up with the
probability of the part that is cut off, in steps of 2^-16. The expected value is the value itself.
"""

import torch
from torch import Tensor

from gradwire.encode.format import BLOCK, FLOATS, LARGEST, LEVELS
from gradwire.encode.noise import Noise, random_words


def put_values(name: str, values: Tensor, noise: Noise | None = None) -> Tensor:
    """Return the values as uint8."""
    if name in FLOATS:
        return _floats(FLOATS[name], values, noise).view(torch.uint8)
    blocks = _blocks(values.float())
    if name == "sign":
        return _signs(blocks, values.numel())
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


def _bit_numbers(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
