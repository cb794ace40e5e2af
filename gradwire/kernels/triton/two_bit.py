"""The writer of two-bit values on CUDA: the levels of a block and its codes, in whole numbers.

Sums are of whole numbers, so their bits do not depend on the order of adding.
"""

import triton
import triton.language as tl

from gradwire.kernels.triton.bits import rounded
from gradwire.kernels.triton.codes import BLOCK, leveled


@triton.jit
def put_two_bits(
    body, seen, indices, values, tile, capacity, size, room, limit,
    TILE: tl.constexpr, FULL: tl.constexpr, REFITS: tl.constexpr,
):  # fmt: skip
    """Write a tile of levels and codes, and the values that receivers see; `tile` is its number."""
    # By fours, because a byte has four codes.
    block = tile * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    byte = block[:, None] * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[None, :]
    i = 4 * byte[:, :, None] + tl.arange(0, 4)[None, None, :]
    value = tl.load(values + i, mask=i < capacity, other=0).to(tl.float32)
    magnitude = tl.where(value == value, tl.minimum(tl.abs(value), limit), 0.0)
    largest = tl.max(tl.max(magnitude, axis=2), axis=1)
    divisor = tl.where(largest > 0, largest, 1.0)[:, None, None] + tl.zeros_like(magnitude)
    share = (tl.div_rn(magnitude, divisor) * FULL).to(tl.int32)
    in_block = tl.maximum(tl.minimum(capacity - block * BLOCK, BLOCK), 1)
    total = tl.sum(tl.sum(share, axis=2), axis=1)
    cut = total // in_block
    cut += cut // 4
    for refit in tl.static_range(REFITS + 1):
        is_large = (share > cut[:, None, None]).to(tl.int32)
        large = tl.sum(tl.sum(is_large, axis=2), axis=1)
        large_total = tl.sum(tl.sum(share * is_large, axis=2), axis=1)
        if refit < REFITS:
            top = tl.where(large > 0, large_total // tl.maximum(large, 1), FULL)
            cut = ((total - large_total) // tl.maximum(in_block - large, 1) + top) // 2
    low = _level(total - large_total, in_block - large, largest, FULL)
    levels = low | (_level(large_total, large, largest, FULL) << 16)
    code = is_large * 2 + (value < 0).to(tl.int32)
    blocks = (capacity + BLOCK - 1) // BLOCK
    tl.store(body + block, levels, mask=block < blocks)
    code = tl.where(i < capacity, code, 0)
    four = tl.sum(code << (2 * tl.arange(0, 4))[None, None, :], axis=2)
    codes = (body + blocks).to(tl.pointer_type(tl.uint8)) + byte
    tl.store(codes, four.to(tl.uint8), mask=byte < room)
    index = tl.load(indices + i, mask=i < capacity, other=0)
    value = tl.where(index < size, leveled(levels[:, None, None], code), 0.0)
    tl.store(seen + i, value, mask=i < capacity)


@triton.jit
def _level(total, count, largest, FULL: tl.constexpr):
    """Return the mean of `count` shares as the 16 bits of a bf16; 0 for none."""
    mean = tl.div_rn(total.to(tl.float32), tl.maximum(count, 1).to(tl.float32))
    mean = rounded(mean * (1 / FULL) * largest, tl.bfloat16)
    return mean.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
