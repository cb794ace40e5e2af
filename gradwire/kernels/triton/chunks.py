"""chunks on CUDA: one launch, with one of two kernels.

With maxima and few winners per chunk, a program of one warp takes several chunks and reads only the
blocks that can win. Nothing waits at a barrier, and many programs have loads in flight at once.
Otherwise a program takes one chunk into its registers, and finds the magnitude of its last winner
by bisection.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.chunks import FEW, chunks_torch
from gradwire.kernels.triton.bits import magnitude
from gradwire.kernels.triton.launch import Launcher
from gradwire.kernels.triton.order import order, tile_entries

TILE = 512
"""Entries, or maxima, that a program of one warp holds. With more winners it takes fewer chunks."""
WIDEST = 16384
"""Entries per chunk that fit into the registers of one program."""


@triton.jit
def _keys(bits, place, negative):
    """Return distinct numbers in the order of winning: by magnitude, then by the smaller place."""
    return (bits.to(tl.int64) << 32) | ((0x7FFFFFFF - place).to(tl.int64) << 1) | negative


@triton.jit
def _place(key):
    return 0x7FFFFFFF - ((key >> 1).to(tl.int32) & 0x7FFFFFFF)


@triton.jit
def _best(keys, EACH: tl.constexpr, ROOM: tl.constexpr):
    """Return the EACH largest keys of every row, in ROOM columns; -1 where there are fewer."""
    column = tl.arange(0, ROOM)[None, :]
    out = tl.full([keys.shape[0], ROOM], -1, tl.int64)
    for j in tl.static_range(EACH):
        top = tl.max(keys, axis=1)[:, None]
        out = tl.where(column == j, top, out)
        keys = tl.where(keys == top, -1, keys)
    return out


@triton.jit(do_not_specialize=["size", "chunk", "rows", "last"])
def _few(
    u, maxima, indices, values, size, chunk, rows, last,
    EACH: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    SIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    start = row.to(tl.int64) * chunk
    length = tl.minimum(tl.maximum(size - start, 0), chunk).to(tl.int32)[:, None]
    # Blocks first: a winner's block has one of the EACH largest maxima.
    block = tl.arange(0, BLOCKS)[None, :]
    inside_chunk = block * BLOCK < length
    largest = tl.load(maxima + (start // BLOCK)[:, None] + block, mask=inside_chunk, other=0)
    keys = tl.where(inside_chunk, _keys(magnitude(largest), block, 0), -1)
    blocks = _best(keys, EACH, ROOM)
    begin = tl.where(blocks >= 0, _place(blocks) * BLOCK, chunk)[:, :, None]
    place = begin + tl.arange(0, BLOCK)[None, None, :]
    inside = place < length[:, :, None]
    entry = tl.load(u + start[:, None, None] + place, mask=inside, other=0).to(tl.float32)
    raw = entry.to(tl.int32, bitcast=True)
    keys = tl.where(inside, _keys(raw & 0x7FFFFFFF, place, (raw >> 31) & 1), -1)
    chosen = _best(tl.reshape(keys, (SIDE, ROOM * BLOCK)), EACH, ROOM)
    wanted = tl.where(row < rows, EACH, tl.where(row == rows, last, 0))[:, None]
    real = tl.arange(0, ROOM)[None, :] < wanted
    spot = _place(chosen)
    earlier = (spot[:, None, :] < spot[:, :, None]) & real[:, None, :]
    out = row[:, None] * EACH + tl.sum(earlier.to(tl.int32), axis=2)
    tl.store(indices + out, start.to(tl.int32)[:, None] + spot, mask=real)
    bits = (chosen >> 32).to(tl.int32) | (chosen << 31).to(tl.int32)
    tl.store(values + out, bits.to(tl.float32, bitcast=True), mask=real)


@triton.jit
def _count(bits, edge):
    """Count the entries of a tile that reach the edge."""
    reach = (bits >= edge).to(tl.int32)
    return tl.sum(tl.sum(tl.sum(reach, axis=2), axis=1), axis=0)


@triton.jit(do_not_specialize=["size", "chunk", "rows", "each", "last"])
def _many(u, indices, values, size, chunk, rows, each, last, LINES: tl.constexpr):
    row = tl.program_id(0)
    start = row.to(tl.int64) * chunk
    length = tl.minimum(size - start, chunk).to(tl.int32)
    wanted = tl.where(row < rows, each, last)
    e = tile_entries(LINES, wanted)
    inside = e < length
    raw = tl.load(u + start + e, mask=inside, other=0).to(tl.float32).to(tl.int32, bitcast=True)
    bits = tl.where(inside, raw & 0x7FFFFFFF, -1)
    # At least `wanted` entries reach `edge`, and fewer reach `beyond`.
    edge = wanted * 0
    beyond = tl.max(tl.max(tl.max(bits, axis=2), axis=1), axis=0) + 1
    reach = length
    while (beyond - edge > 1) & (reach != wanted):
        middle = edge + (beyond - edge) // 2
        reaching = _count(bits, middle)
        reach = tl.where(reaching >= wanted, reaching, reach)
        edge = tl.where(reaching >= wanted, middle, edge)
        beyond = tl.where(reaching >= wanted, beyond, middle)
    chosen = (bits >= edge).to(tl.int32)
    if reach > wanted:
        # Only one magnitude is left between the two: the first of the ties win.
        tie = (bits == edge).to(tl.int32)
        rank, ties = order(tie, LINES)
        spare = (tie > 0) & (rank >= wanted - (reach - ties))
        chosen = tl.where(spare, 0, chosen)
    out, _ = order(chosen, LINES)
    out += row * each
    tl.store(indices + out, start.to(tl.int32) + e, mask=chosen > 0)
    tl.store(values + out, raw.to(tl.float32, bitcast=True), mask=chosen > 0)


_launch_few = Launcher(_few, "indices values", num_warps=1)
# 16 entries per thread: with more, a wide chunk does not stay in registers.
_launch_many = {
    warps: Launcher(_many, "indices values", num_warps=warps) for warps in (1, 2, 4, 8, 16, 32)
}


def chunks_triton(
    u: Tensor, chunk: int, each: int, last: int, maxima: Tensor | None = None, block: int = 0
) -> tuple[Tensor, Tensor]:
    """Compute `chunks` in one launch.

    With maxima it moves 4 / block bytes per entry and 4 block + 8 per winner, else 4 per entry.
    """
    size = u.numel()
    rows = size // chunk
    few = maxima is not None and _blocks_help(chunk, each, last, block)
    if chunk > WIDEST and not few:
        return chunks_torch(u, chunk, each, last)
    room = rows * each + last
    indices = torch.empty(room, dtype=torch.int32, device=u.device)
    values = torch.empty(room, dtype=u.dtype, device=u.device)
    if room == 0:
        return indices, values
    many = rows + (last > 0)
    if maxima is not None and few:
        wide, blocks = _power(each), _power(chunk // block)
        side = max(1, TILE // max(wide * block, blocks))
        _launch_few(
            -(-many // side), u, u, maxima, indices, values, size, chunk, rows, last,
            each, wide, block, blocks, side,
        )  # fmt: skip
        return indices, values
    lines = max(1, _power(chunk) // 128)
    _launch_many[max(1, lines // 4)](
        many, u, u, indices, values, size, chunk, rows, each,
        last, lines,
    )  # fmt: skip
    return indices, values


def _blocks_help(chunk: int, each: int, last: int, block: int) -> bool:
    """Return True if few blocks of a chunk, known by their maxima, hold all its winners."""
    whole = chunk % block == 0 and block == _power(block) and chunk // block <= TILE
    return whole and last <= each <= FEW and 2 * each * block <= chunk


def _power(n: int) -> int:
    """Return the power of two that is n or the next above it."""
    return 1 << (n - 1).bit_length()
