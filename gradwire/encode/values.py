"""How values travel.

fp32, bf16, fp16   as they are, or rounded.
int8, int4         blocks of 256 values share an fp32 scale, max |v| / 127 or / 7.
sign               one bit a value, 1 for a negative one; blocks of 256 share the mean |v|, zeros
                   left out. Of all numbers the mean is nearest to the values (scaled sign of
                   Karimireddy et al. 2019); the largest ones lose most, and the residual keeps it.

Rounding is to the nearest, ties to even. With `noise` it is stochastic: up with the probability of
the part that is cut off, in steps of 2^-16, so that the expected value is the value itself.
"""

import torch
from torch import Tensor

from gradwire.encode.format import BLOCK, FLOATS, LARGEST, LEVELS
from gradwire.encode.noise import Noise, random_words


def put_values(name: str, values: Tensor, noise: Noise | None = None) -> Tensor:
    """The values as uint8."""
    if name in FLOATS:
        return _floats(FLOATS[name], values, noise).view(torch.uint8)
    blocks = _blocks(values.float())
    if name == "sign":
        return _signs(blocks, values.numel())
    # Tensors, not numbers: CUDA multiplies by the reciprocal of a number.
    levels = blocks.new_full((), LEVELS[name])
    scale = blocks.abs().amax(1).clamp(max=LARGEST) / levels
    share = torch.where(scale > 0, scale, 1).reciprocal().unsqueeze(1) * blocks
    share = share.nan_to_num(0).view(-1)[: values.numel()]
    if noise is None:
        share = share.round()
    else:
        share = (share + (random_words(noise, values.numel()) >> 16).float() * 2.0**-16).floor()
    codes = share.clamp(-LEVELS[name], LEVELS[name]).to(torch.int8)
    if name == "int4":
        codes = _nibbles(codes)
    return torch.cat([scale.view(torch.uint8), codes.view(torch.uint8)])


def get_values(name: str, part: Tensor, capacity: int) -> Tensor:
    """The fp32 values that `put_values` stored, as every receiver sees them.

    part: uint8 [bytes], or [messages, bytes].
    """
    if name in FLOATS:
        return part.view(FLOATS[name]).float()
    split = 4 * -(-capacity // BLOCK)
    scale, codes = part[..., :split].view(torch.float32), part[..., split:]
    if name == "int4":
        both = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
        numbers = both[..., :capacity].float() - 8
    elif name == "sign":
        bits = (codes.unsqueeze(-1) >> _eight(codes)) & 1
        numbers = 1 - 2 * bits.flatten(-2)[..., :capacity].float()
    else:
        numbers = codes.view(torch.int8).float()
    return numbers * scale.repeat_interleave(BLOCK, -1)[..., :capacity]


def _floats(dtype: torch.dtype, values: Tensor, noise: Noise | None) -> Tensor:
    # Above its largest number a dtype rounds to infinity; clamped, the rest stays behind.
    limit = torch.finfo(dtype).max
    values = values.float().clamp(-limit, limit)
    if noise is None:
        return values.to(dtype)
    # bf16 is the upper half of fp32: random lower halves carry over as often as they should.
    words = values.view(torch.int32) + (random_words(noise, values.numel()) >> 16).int()
    return (words >> 16).to(torch.int16).view(torch.bfloat16)


def _blocks(values: Tensor) -> Tensor:
    n = -(-values.numel() // BLOCK)
    out = values.new_zeros(n * BLOCK)
    out[: values.numel()] = values
    return out.view(n, BLOCK)


def _nibbles(codes: Tensor) -> Tensor:
    """Two codes a byte, the first one low; each is stored with 8 added."""
    even = codes.new_full((-(-codes.numel() // 2) * 2,), 0)
    even[: codes.numel()] = codes
    low, high = (even + 8).view(-1, 2).unbind(1)
    return low.to(torch.uint8) | (high.to(torch.uint8) << 4)


def _signs(blocks: Tensor, count: int) -> Tensor:
    """The mean |v| of every block, and eight signs a byte, the first one lowest."""
    size = blocks.nan_to_num(0, LARGEST, -LARGEST).abs()
    shares = (blocks != 0).sum(1).clamp(min=1)
    # Divided first: a sum of the largest numbers would be infinite.
    scale = (size / shares.unsqueeze(1)).sum(1).clamp(max=LARGEST)
    bits = (blocks < 0).view(-1, 8).to(torch.uint8)
    codes = (bits << _eight(bits)).sum(1, dtype=torch.uint8)[: -(-count // 8)]
    return torch.cat([scale.view(torch.uint8), codes])


def _eight(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
