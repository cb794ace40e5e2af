"""Put the marked entries of a tile in order: the core of every compaction here.

A tile is [4, ROWS, 32]: entry e of the tile lies in row e // 128, plane e // 32 % 4, lane e % 32. A
row belongs to one warp and a lane to one thread, so the running count within a row needs no shared
memory. The four planes are counted at once, in the four bytes of a word.
"""

import triton
import triton.language as tl


@triton.jit
def tile_entries(ROWS: tl.constexpr, positive):
    """Return the entries of a tile: 0 .. 128 ROWS - 1.

    The compiler must not see that they follow each other. It would load four at a time, and then
    move all of them through shared memory to store one at a time. `positive >> 31` is zero, but the
    compiler cannot know.
    """
    row = tl.arange(0, ROWS)[None, :, None] * 128
    plane = tl.arange(0, 4)[:, None, None] * 32
    lane = tl.arange(0, 32)[None, None, :]
    return (row + plane + lane) ^ (positive >> 31)


@triton.jit
def order(ones, ROWS: tl.constexpr):
    """Return the number of marked entries (1, others 0) before each one, and the number of all."""
    plane = tl.arange(0, 4)[:, None, None] * 8
    # One byte per plane: at most 32 in one, 128 in all four, so no byte overflows.
    packed = tl.sum(ones << plane, axis=0)
    within = tl.cumsum(packed, axis=1)
    each = tl.sum(packed, axis=1)
    upto = each * 0x01010101
    total = (upto >> 24) & 255
    r = tl.arange(0, ROWS)
    before = tl.sum(tl.where(r[None, :] < r[:, None], total[None, :], 0), axis=1)
    inside = within + (upto - each)[:, None]
    place = before[None, :, None] + ((inside[None, :, :] >> plane) & 255) - ones
    return place, tl.sum(total)
