"""join on CUDA: a sort and two launches.

The first launch counts the distinct indices in each part of the sorted lists. The second adds up
the counts before its own part, and writes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.triton.launch import Launcher

TILE = 1024
PARTS = 512
"""Parts at most, because each program adds up the counts of all parts."""


@triton.jit
def _first_ones(ascending, start, n, size, TILE: tl.constexpr):
    """Return a tile of the sorted indices, and a mark (1, else 0) at each first occurrence.

    Padding has no mark.
    """
    i = start + tl.arange(0, TILE)
    index = tl.load(ascending + i, mask=i < n, other=size)
    before = tl.load(ascending + i - 1, mask=(i > 0) & (i < n), other=-1)
    return index, ((index != before) & (index < size)).to(tl.int32)


@triton.jit(do_not_specialize=["n", "size", "share"])
def _count(counts, ascending, n, size, share, TILE: tl.constexpr):
    part = tl.program_id(0)
    total = tl.zeros([TILE], tl.int32)
    for tile in range(part * share, part * share + share):
        total += _first_ones(ascending, tile * TILE, n, size, TILE)[1]
    tl.store(counts + part, tl.sum(total))


@triton.jit(do_not_specialize=["n", "size", "room", "parts", "share"])
def _join(
    indices, values, count, ascending, counts, u, n, size, room, parts, share,
    PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    p = tl.arange(0, PARTS)
    part_counts = tl.load(counts + p, mask=p < parts, other=0)
    base = tl.sum(tl.where(p < part, part_counts, 0))
    total = tl.sum(part_counts)
    for tile in range(part * share, part * share + share):
        index, ones = _first_ones(ascending, tile * TILE, n, size, TILE)
        place = base + tl.cumsum(ones, axis=0) - ones
        tl.store(indices + place, index, mask=ones > 0)
        tl.store(values + place, tl.load(u + index, mask=ones > 0, other=0), mask=ones > 0)
        base += tl.sum(ones)
    for start in range(total + part * TILE, room, parts * TILE):
        i = start + tl.arange(0, TILE)
        tl.store(indices + i, tl.zeros([TILE], tl.int32) + size, mask=i < room)
        tl.store(values + i, tl.zeros([TILE], tl.float32), mask=i < room)
    if part == 0:
        tl.store(count, total)


_launch_count = Launcher(_count, "counts ascending", num_warps=4)
_launch_join = Launcher(_join, "indices values count ascending counts", num_warps=4)


def join_triton(lists: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `join` with a sort and two launches.

    After the sort it reads the lists twice. It moves 8 bytes and a sector of 32 per distinct index.
    """
    n, size = lists.numel(), u.numel()
    room = min(size, n)
    ascending = lists.sort().values
    indices = torch.empty(room, dtype=torch.int32, device=u.device)
    values = torch.empty(room, dtype=u.dtype, device=u.device)
    count = torch.empty((), dtype=torch.int32, device=u.device)
    share = max(1, -(-n // (TILE * PARTS)))
    parts = max(1, -(-n // (TILE * share)))
    counts = torch.empty(parts, dtype=torch.int32, device=u.device)
    _launch_count(parts, u, counts, ascending, n, size, share, TILE)
    _launch_join(
        parts, u, indices, values, count, ascending, counts, u, n, size, room, parts, share,
        PARTS, TILE,
    )  # fmt: skip
    return indices, values, count
