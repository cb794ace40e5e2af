"""The codes of indices and values, for `write` and `unpack`."""

import triton
import triton.language as tl

from gradwire.kernels.triton.hashing import lowbias32

# The codes of encode/format.py, as constants that kernels can read.
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
TWO_BIT = tl.constexpr(6)
BLOCK = tl.constexpr(256)


@triton.jit
def random_halves(step, key, entry):
    """Return the upper 16 bits of `random_words` for these entries; `key` is given less 2^31."""
    stream = lowbias32(tl.load(step).to(tl.uint32) + (key.to(tl.uint32) + 0x80000000))
    return lowbias32(entry.to(tl.uint32) * 0x9E3779B9 + stream) >> 16


@triton.jit
def ones_in(x):
    """Count the set bits of a uint32."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def position(indices, i, real, low, CODE: tl.constexpr):
    """Return the position of entry i's set bit, ascending in i; for LOCAL16 just the index."""
    index = tl.load(indices + i, mask=real, other=0x7FFFFFFF).to(tl.int64)
    if CODE == PACKED:
        index = (index >> low) + i
    return index


@triton.jit
def count_below(indices, target, capacity, low, CODE: tl.constexpr, TILE: tl.constexpr):
    """Count for each target the entries of smaller position, by a binary search."""
    base = tl.zeros([TILE], tl.int32)
    step = tl.full([], 1 << 30, tl.int32)
    while step > 0:
        if step <= capacity:
            real = step <= capacity - base
            at = position(indices, base + step - 1, real, low, CODE)
            base += tl.where(real & (at < target), step, 0)
        step >>= 1
    return base


@triton.jit
def quantised(share, half, LEVELS: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Return the level of a value that was divided by its scale."""
    share = tl.where(share == share, share, 0.0)
    # Levels are whole numbers, so a clamp before rounding equals a clamp after it.
    share = tl.minimum(tl.maximum(share, -LEVELS), LEVELS)
    if STOCHASTIC:
        level = tl.floor(share + half.to(tl.float32) * 0.0000152587890625)
        return tl.minimum(level, LEVELS).to(tl.int32)
    else:
        # Adding and subtracting 1.5 x 2^23 rounds to nearest, ties to even.
        return ((share + 12582912.0) - 12582912.0).to(tl.int32)


@triton.jit
def leveled(levels, code):
    """Return the value of a two-bit code; the word `levels` holds both levels of its block."""
    bits = tl.where(code >= 2, levels & -65536, levels << 16)
    return (bits | ((code & 1) << 31)).to(tl.float32, bitcast=True)


@triton.jit
def value_at(body, i, real, capacity, CODE: tl.constexpr):
    """Return the fp32 value of each entry i of a message whose values begin at the word `body`.

    A code below zero means that the message has no values; the result is then zero.
    """
    if CODE < 0:
        return (i * 0).to(tl.float32)
    elif CODE == FP32:
        return tl.load(body.to(tl.pointer_type(tl.float32)) + i, mask=real, other=0)
    elif CODE == BF16:
        half = tl.load(body.to(tl.pointer_type(tl.int16)) + i, mask=real, other=0)
        return (half.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif CODE == FP16:
        half = tl.load(body.to(tl.pointer_type(tl.float16)) + i, mask=real, other=0)
        return half.to(tl.float32)
    elif CODE == TWO_BIT:
        levels = tl.load(body + i // BLOCK, mask=real, other=0)
        codes = (body + (capacity + BLOCK - 1) // BLOCK).to(tl.pointer_type(tl.uint8))
        four = tl.load(codes + i // 4, mask=real, other=0).to(tl.int32)
        return leveled(levels, (four >> ((i & 3) * 2)) & 3)
    else:
        scale = tl.load(body.to(tl.pointer_type(tl.float32)) + i // BLOCK, mask=real, other=0)
        codes = body + (capacity + BLOCK - 1) // BLOCK
        if CODE == INT8:
            level = tl.load(codes.to(tl.pointer_type(tl.int8)) + i, mask=real, other=0)
            return level.to(tl.float32) * scale
        else:
            nibbles = tl.load(codes.to(tl.pointer_type(tl.uint8)) + i // 2, mask=real, other=0x88)
            level = (nibbles.to(tl.int32) >> ((i & 1) * 4)) & 15
            return (level - 8).to(tl.float32) * scale
