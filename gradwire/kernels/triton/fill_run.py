"""fill_run on CUDA: one launch counts in tiles, the next writes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.triton.bits import magnitude
from gradwire.kernels.triton.launch import Launcher

TILE = 2048


@triton.jit
def _tile(indices, values, threshold, size, n, TILE: tl.constexpr):
    """Return a tile's indices, values, and ones for entries beyond the threshold and for others."""
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    index = tl.load(indices + i, mask=i < n, other=size)
    value = tl.load(values + i, mask=i < n, other=0)
    real = index < size
    sure = real & (magnitude(value) > magnitude(tl.load(threshold)))
    return index, value, sure.to(tl.int32), (real & (sure == 0)).to(tl.int32)


@triton.jit(do_not_specialize=["size", "n"], do_not_specialize_on_alignment=["threshold"])
def _count(counts, indices, values, threshold, size, n, TILE: tl.constexpr):
    _, _, sure, others = _tile(indices, values, threshold, size, n, TILE)
    tl.store(counts + 2 * tl.program_id(0), tl.sum(sure))
    tl.store(counts + 2 * tl.program_id(0) + 1, tl.sum(others))


@triton.jit(
    do_not_specialize=["size", "n", "tiles", "k", "room"],
    do_not_specialize_on_alignment=["threshold", "number"],
)
def _write(
    out, kept, count, counts, indices, values, threshold, number, size, n, tiles, k, room,
    LANES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    other = tl.arange(0, LANES)
    all_sure = tl.load(counts + 2 * other, mask=other < tiles, other=0)
    all_others = tl.load(counts + 2 * other + 1, mask=other < tiles, other=0)
    before_others = tl.sum(tl.where(other < tile, all_others, 0))
    wanted = tl.maximum(k - tl.sum(all_sure), 0)
    span = tl.maximum(tl.sum(all_others) - wanted + 1, 1)
    start = (tl.load(number) % span.to(tl.int64)).to(tl.int32)
    index, value, sure, others = _tile(indices, values, threshold, size, n, TILE)
    place = before_others + tl.cumsum(others, axis=0) - others
    run = (others > 0) & (place >= start) & (place < start + wanted)
    chosen = sure + run.to(tl.int32)
    before = tl.sum(tl.where(other < tile, all_sure, 0))
    before += tl.minimum(tl.maximum(before_others - start, 0), wanted)
    to = before + tl.cumsum(chosen, axis=0) - chosen
    tl.store(out + to, index, mask=(chosen > 0) & (to < room))
    tl.store(kept + to, value, mask=(chosen > 0) & (to < room))
    total = tl.sum(all_sure) + tl.minimum(wanted, tl.sum(all_others))
    total = tl.minimum(total, room)
    i = tile * TILE + tl.arange(0, TILE)
    padding = (i >= total) & (i < room)
    tl.store(out + i, tl.zeros([TILE], tl.int32) + size, mask=padding)
    tl.store(kept + i, tl.zeros([TILE], value.dtype), mask=padding)
    if tile == 0:
        tl.store(count, total)


_launch_count = Launcher(_count, "counts indices values", num_warps=8)
_launch_write = Launcher(_write, "out kept count counts indices values", num_warps=8)


def fill_run_triton(
    indices: Tensor, values: Tensor, threshold: Tensor, k: int, number: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `fill_run` in two launches, which both read the list."""
    n, room, device = indices.numel(), min(k, size), indices.device
    tiles = -(-n // TILE)
    counts = torch.empty(2 * tiles, dtype=torch.int32, device=device)
    out = torch.empty(room, dtype=torch.int32, device=device)
    kept = torch.empty(room, dtype=values.dtype, device=device)
    count = torch.empty((), dtype=torch.int32, device=device)
    _launch_count(tiles, values, counts, indices, values, threshold, size, n, TILE)
    _launch_write(
        tiles, values, out, kept, count, counts, indices, values, threshold, number, size, n,
        tiles, k, room, triton.next_power_of_2(tiles), TILE,
    )  # fmt: skip
    return out, kept, count
