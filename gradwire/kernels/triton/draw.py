"""draw on CUDA: two launches after a clearing, without a host sync.

The drawn entries are spread evenly, so they are easy to sort. The first launch puts each entry into
the bucket of its value, 16 per bucket on average, in the order of arrival. The second launch counts
the entries of the buckets before, and the smaller entries in the same bucket. The two counts give
the place of each entry. The order of arrival therefore does not matter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.dispatch import constant
from gradwire.kernels.draw import ROUNDS, grid
from gradwire.kernels.side_stream import side_stream_pays
from gradwire.kernels.triton.hashing import splitmix64_golden
from gradwire.kernels.triton.launch import Launcher
from gradwire.kernels.triton.select.turns import FINE, MAX_ITEMS, look_back, next_ticket

MEAN = 16
"""Entries per bucket, on average."""
ROOM = 128
"""Entries that a bucket can hold; one bucket in 10^60 would be fuller."""
TILE = 128
SIDE = 32
"""Buckets, and entries of each bucket, that a program sorts at once."""
PATIENT = 8
"""Factor on the work of a program while a scan runs at the same time. Fewer programs then leave
more of the device to the scan."""
TURNS = tl.constexpr(ROUNDS)


@triton.jit
def _hash(x, key):
    """Return 31 bits of the hash."""
    return (splitmix64_golden(x.to(tl.int64) + key) & 0x7FFFFFFF).to(tl.uint32)


@triton.jit
def _feistel(x, a, b, key):
    """Permute as the reference does; a and b are below 2^16, so 32 bits hold every sum."""
    left = x // b
    right = x % b
    for r in tl.static_range(TURNS):
        left = (left + _hash(right, key + 2 * r)) % a
        right = (right + _hash(left, key + 2 * r + 1)) % b
    return left * b + right


@triton.jit(do_not_specialize=["k", "size", "a", "b", "stream", "factor", "room"])
def _drop(work, cells, draws, k, size, a, b, stream, factor, room, TILE: tl.constexpr):
    """Draw entries, and put each into its bucket."""
    key = splitmix64_golden(tl.load(draws) + stream)
    wide, high = a.to(tl.uint32), b.to(tl.uint32)
    limit = size.to(tl.uint32)
    for start in range(tl.program_id(0).to(tl.int64) * TILE, k, tl.num_programs(0) * TILE):
        i = start + tl.arange(0, TILE)
        real = i < k
        # A walk that begins inside returns to the inside, so the loop ends.
        x = _feistel(i.to(tl.uint32), wide, high, key)
        while tl.max((real & (x >= limit)).to(tl.int32), axis=0) > 0:
            x = tl.where(x < limit, x, _feistel(x, wide, high, key))
        bucket = ((x.to(tl.int64) * factor) >> 31).to(tl.int32)
        slot = tl.atomic_add(work + FINE + bucket, 1, mask=real, sem="relaxed")
        free_cell = cells + bucket.to(tl.int64) * room + slot
        tl.store(free_cell, x.to(tl.int32), mask=real & (slot < room))


@triton.jit
def _shift(ends, shifts, x, real, slots, STEPS: tl.constexpr):
    """Return the shift of each x: that of the slot after all slots that end at x or before."""
    before = x * 0
    for step in tl.static_range(STEPS):
        probe = before + (1 << (STEPS - 1 - step))
        some = real & (probe <= slots)
        end = tl.load(ends + probe - 1, mask=some, other=0)
        before = tl.where(some & (end <= x), probe, before)
    return tl.load(shifts + before, mask=real, other=0).to(tl.int32)


@triton.jit(do_not_specialize=["buckets", "share", "slots", "room"])
def _rank(
    work, cells, draws, ends, shifts, indices, buckets, share, slots, room,
    ITEMS: tl.constexpr, STEPS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Write the entries of `share` buckets to their places, in ascending order."""
    item = next_ticket(work)
    if item == 0:
        tl.store(draws, tl.load(draws) + 1)
    first = item * share
    end = tl.minimum(first + share, buckets)
    line = tl.arange(0, SIDE)
    total = 0
    for start in range(first, end, SIDE):
        total += tl.sum(tl.load(work + FINE + start + line, mask=start + line < end, other=0))
    base, _ = look_back(work, item, total, total * 0, ITEMS)
    column = tl.arange(0, SIDE)[None, :]
    for start in range(first, end, SIDE):
        bucket = start + line
        count = tl.load(work + FINE + bucket, mask=bucket < end, other=0)
        before = base + tl.cumsum(count, axis=0) - count
        base += tl.sum(count)
        bucket_cells = cells + bucket.to(tl.int64) * room
        widest = tl.max(count, axis=0)
        for c in range(0, widest, SIDE):
            real = c + column < count[:, None]
            x = tl.load(bucket_cells[:, None] + c + column, mask=real, other=0)
            rank = tl.zeros([SIDE, SIDE], tl.int32)
            for s in range(widest):
                other = tl.load(bucket_cells + s, mask=s < count, other=0x7FFFFFFF)
                rank += (other[:, None] < x).to(tl.int32)
            index = x
            if STEPS:
                index += _shift(ends, shifts, x, real, slots, STEPS)
            tl.store(indices + before[:, None] + rank, index, mask=real)


@triton.jit(do_not_specialize=["k"])
def _pick(u, indices, values, k, TILE: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    real = i < k
    index = tl.load(indices + i, mask=real, other=0)
    tl.store(values + i, tl.load(u + index, mask=real, other=0), mask=real)


_launch_pick = Launcher(_pick, "values", num_warps=4)
_launch_drop = Launcher(_drop, "work cells", num_warps=4)
_launch_rank = Launcher(_rank, "work cells indices", num_warps=4)


def draw_triton(
    k: int,
    size: int,
    length: int,
    draws: Tensor,
    stream: int,
    ends: Tensor | None = None,
    shifts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `draw`; walk until every entry is inside.

    Moves 42 bytes per drawn entry, mostly in the cache.
    """
    device = draws.device
    indices = torch.empty(k, dtype=torch.int32, device=device)
    buckets = max(1, -(-k // MEAN))
    # A bucket cannot hold more entries than it has values.
    room = min(ROOM, -(-size // buckets) + 1)
    patient = PATIENT if side_stream_pays(length, device) else 1
    share = -(-buckets // (SIDE * MAX_ITEMS)) * SIDE * patient
    items = -(-buckets // share)
    # The counters of look_back, then one for each bucket.
    work = torch.zeros(FINE.value + buckets, dtype=torch.int32, device=device)
    cells = torch.empty(buckets * room, dtype=torch.int32, device=device)
    a, b = grid(size)
    factor = min((buckets << 31) // size, 2**31 - 1)
    _launch_drop(
        max(1, -(-k // (TILE * patient))), draws, work, cells, draws, k, size, a, b, stream,
        factor, room, TILE,
    )  # fmt: skip
    slots = 0 if ends is None else ends.numel()
    looks, steps = 1 << (items - 1).bit_length(), slots.bit_length()
    _launch_rank(
        items, draws, work, cells, draws, ends, shifts, indices,
        buckets, share, slots, room, looks, steps, SIDE,
    )  # fmt: skip
    return indices, constant(k, device)


def pick_triton(u: Tensor, indices: Tensor) -> Tensor:
    """Compute `pick` in one launch; it moves 40 bytes per entry."""
    k = indices.numel()
    values = torch.empty(k, dtype=u.dtype, device=u.device)
    _launch_pick(max(1, -(-k // (2 * TILE))), u, u, indices, values, k, 2 * TILE)
    return values
