"""sketch on CUDA: hashes on the fly, integer atomics, and a query that leaves block maxima.

The table should fit into the L2 cache. Nothing of size d x rows is ever written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.triton.hashing import fmix32
from gradwire.kernels.triton.launch import Launcher

TILE = 1024
LOOK = 256


@triton.jit
def _cell(hashed, columns):
    """Return the column of a hash: 31 bits of it, spread over the columns."""
    return ((hashed >> 1).to(tl.int64) * columns) >> 31


@triton.jit(do_not_specialize=["size", "columns"])
def _insert(u, table, seeds, factor, size, columns, ROWS: tl.constexpr, TILE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    entry = tl.load(u + i, mask=i < size, other=0)
    number = (entry.to(tl.float64) * tl.load(factor)).to(tl.int64)
    for row in tl.static_range(ROWS):
        hashed = fmix32(i.to(tl.uint32) ^ tl.load(seeds + row).to(tl.uint32, bitcast=True))
        signed = tl.where((hashed & 1) == 1, -number, number)
        at = table + row * columns.to(tl.int64) + _cell(hashed, columns)
        # A sum of integers does not depend on the order.
        tl.atomic_add(at, signed, mask=number != 0, sem="relaxed")


@triton.jit(do_not_specialize=["size", "columns"])
def _query(
    table, seeds, out, maxima, size, columns,
    ROWS: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    row = tl.arange(0, ROOM)
    seed = tl.load(seeds + row, mask=row < ROWS, other=0).to(tl.uint32, bitcast=True)
    hashed = fmix32(i.to(tl.uint32)[:, None] ^ seed[None, :])
    at = table + row[None, :] * columns.to(tl.int64) + _cell(hashed, columns)
    real = (row < ROWS)[None, :] & (i < size)[:, None]
    value = tl.load(at, mask=real, other=0)
    value = tl.where((hashed & 1) == 1, -value, value)
    # The rows that fill up ROOM are infinite, so the median is the (ROWS // 2)-th from below.
    value = tl.where((row < ROWS)[None, :], value, float("inf"))
    below = value[:, None, :] < value[:, :, None]
    tied = (value[:, None, :] == value[:, :, None]) & (row[None, None, :] < row[None, :, None])
    rank = tl.sum((below | tied).to(tl.int32), axis=2)
    middle = tl.sum(tl.where(rank == ROWS // 2, tl.abs(value), 0.0), axis=1)
    middle = tl.where(i < size, middle, 0.0)
    tl.store(out + i, middle, mask=i < size)
    if maxima is not None:
        each = tl.max(tl.reshape(middle, (TILE // BLOCK, BLOCK)), axis=1)
        block = tl.program_id(0).to(tl.int64) * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
        tl.store(maxima + block, each, mask=block * BLOCK < size)


_launch_insert = Launcher(_insert, "table", num_warps=4, enable_fp_fusion=False)
_launch_query = Launcher(_query, "out maxima", num_warps=4, enable_fp_fusion=False)


def insert_triton(u: Tensor, columns: int, seeds: Tensor, factor: Tensor) -> Tensor:
    """Compute `insert_torch` in one launch: read u once, and add 8 bytes per entry and row."""
    rows = seeds.numel()
    table = torch.zeros(rows, columns, dtype=torch.int64, device=u.device)
    grid = -(-u.numel() // TILE)
    _launch_insert(grid, u, u, table, seeds, factor, u.numel(), columns, rows, TILE)
    return table


def query_triton(
    table: Tensor, seeds: Tensor, size: int, block: int
) -> tuple[Tensor, Tensor | None]:
    """Compute `query` in one launch.

    Reads a sector from the cache per entry and row; writes 4 bytes per entry and 4 / block.
    """
    rows, columns = table.shape
    out = torch.empty(size, dtype=torch.float32, device=table.device)
    maxima = out.new_empty(-(-size // block)) if block else None
    grid = -(-size // LOOK)
    room = 1 << (rows - 1).bit_length()
    _launch_query(grid, out, table, seeds, out, maxima, size, columns, rows, room, block or 1, LOOK)
    return out, maxima
