"""The codes of indices and values, as pack and unpack use them on CUDA."""

import triton
import triton.language as tl

from gradwire.kernels.triton.hashing import lowbias32

# As in encode: the header's codes, the entries of a scale and of a block of local16.
INT32 = tl.constexpr(0)
COMMON = tl.constexpr(1)
PACKED = tl.constexpr(2)
BITMAP = tl.constexpr(3)
LOCAL16 = tl.constexpr(4)
FP32 = tl.constexpr(0)
BF16 = tl.constexpr(1)
FP16 = tl.constexpr(2)
INT8 = tl.constexpr(3)
INT4 = tl.constexpr(4)
BLOCK = tl.constexpr(256)


@triton.jit
def random_halves(step, key, entry):
    """The upper 16 bits of `random_words`, for these entries; `key` less 2^31."""
    stream = lowbias32(tl.load(step).to(tl.uint32) + (key.to(tl.uint32) + 0x80000000))
    return lowbias32(entry.to(tl.uint32) * 0x9E3779B9 + stream) >> 16


@triton.jit
def ones_in(x):
    """How many bits of a uint32 are set."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def position(indices, i, there, low, CODE: tl.constexpr):
    """Where entry i sets its bit: ascending in i. With LOCAL16 just the index."""
    index = tl.load(indices + i, mask=there, other=0x7FFFFFFF).to(tl.int64)
    if CODE == PACKED:
        index = (index >> low) + i
    return index


@triton.jit
def count_below(indices, target, capacity, low, CODE: tl.constexpr, TILE: tl.constexpr):
    """For each target how many entries have a smaller position."""
    base = tl.zeros([TILE], tl.int32)
    step = tl.full([], 1 << 30, tl.int32)
    while step > 0:
        if step <= capacity:
            there = step <= capacity - base
            at = position(indices, base + step - 1, there, low, CODE)
            base += tl.where(there & (at < target), step, 0)
        step >>= 1
    return base


@triton.jit
def quantised(share, half, LEVELS: tl.constexpr, STOCHASTIC: tl.constexpr):
    """A value over its scale -> its level."""
    share = tl.where(share == share, share, 0.0)
    # Levels are whole numbers, so cutting before rounding is cutting after it.
    share = tl.minimum(tl.maximum(share, -LEVELS), LEVELS)
    if STOCHASTIC:
        level = tl.floor(share + half.to(tl.float32) * 0.0000152587890625)
        return tl.minimum(level, LEVELS).to(tl.int32)
    else:
        # Adding and taking away 1.5 x 2^23 rounds to the nearest even.
        return ((share + 12582912.0) - 12582912.0).to(tl.int32)


@triton.jit
def value_at(body, i, there, capacity, CODE: tl.constexpr):
    """The fp32 value of each entry i of a message whose values begin at the word `body`.

    A code below zero says that there are none: zeros.
    """
    if CODE < 0:
        return (i * 0).to(tl.float32)
    elif CODE == FP32:
        return tl.load(body.to(tl.pointer_type(tl.float32)) + i, mask=there, other=0)
    elif CODE == BF16:
        half = tl.load(body.to(tl.pointer_type(tl.int16)) + i, mask=there, other=0)
        return (half.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif CODE == FP16:
        half = tl.load(body.to(tl.pointer_type(tl.float16)) + i, mask=there, other=0)
        return half.to(tl.float32)
    else:
        scale = tl.load(body.to(tl.pointer_type(tl.float32)) + i // BLOCK, mask=there, other=0)
        codes = body + (capacity + BLOCK - 1) // BLOCK
        if CODE == INT8:
            level = tl.load(codes.to(tl.pointer_type(tl.int8)) + i, mask=there, other=0)
            return level.to(tl.float32) * scale
        else:
            both = tl.load(codes.to(tl.pointer_type(tl.uint8)) + i // 2, mask=there, other=0x88)
            level = (both.to(tl.int32) >> ((i & 1) * 4)) & 15
            return (level - 8).to(tl.float32) * scale
