"""mean_of_messages on CUDA: one launch writes the mean once, at its final place.

A program owns a span of the mean, or of one of the target's pieces. It first fills the span, if
nobody has zeroed it before. A search finds the entries of each message that fall into the span.
They are added rank by rank with a barrier in between. Without atomics, the bits are always the
same.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.side_stream import Target
from gradwire.kernels.triton.launch import Launcher
from gradwire.kernels.triton.scan import locate_tile
from gradwire.kernels.triton.target import tiles_of

SPAN = 32768
"""Entries of the mean per program."""
WIDE = 131072
"""The span if the target is zeroed already: enough sent entries for all threads."""
FILL = 4096
WARPS = 8
FAN = tl.constexpr(32)


@triton.jit
def _all_usable(gathered, own, stride, ranks, RANKS: tl.constexpr):
    """Return 1 if every header agrees with this rank's own header and says finite."""
    r = tl.arange(0, RANKS)[:, None]
    w = tl.arange(0, 8)[None, :]
    real = r < ranks
    word = tl.load(gathered + r.to(tl.int64) * stride + w, mask=real, other=0)
    expected = tl.load(own + w + r * 0)
    good = tl.where(w == 4, word == 1, (word == expected) | (w == 3)) | (r >= ranks)
    return tl.min(tl.min(good.to(tl.int32), axis=1), axis=0)


@triton.jit
def _search(first, targets, capacity, real, SEEKERS: tl.constexpr):
    """Count for each seeker the indices of its ascending list that lie below its target.

    A round makes FAN probes. real: True for a seeker of a rank that exists.
    """
    base = tl.zeros([SEEKERS], tl.int32)
    width = capacity
    j = tl.arange(0, FAN)[None, :]
    while width > 0:
        step = (width + FAN - 1) // FAN
        at = base[:, None] + (j + 1) * step - 1
        known = real[:, None] & ((j + 1) * step <= width) & (at < capacity)
        index = tl.load(first[:, None] + at, mask=known, other=0x7FFFFFFF)
        below = (index < targets[:, None]) & known
        base += tl.sum(below.to(tl.int32), axis=1) * step
        width = step - 1
    return base


@triton.jit(do_not_specialize=["stride", "size", "capacity", "ranks", "length"])
def _mean_of_messages(
    out, ok, gathered, own, common, rows, stride, size, capacity, ranks, length,
    DTYPE: tl.constexpr, RANKS: tl.constexpr, SPAN: tl.constexpr, FILL: tl.constexpr,
    ALIGNED: tl.constexpr, PIECES: tl.constexpr, ZEROED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    place = tl.zeros([], tl.int64)
    if PIECES:
        tile, out, place, length, _ = locate_tile(rows, tl.float32, ALIGNED, PIECES)
    first = tile.to(tl.int64) * SPAN
    usable = _all_usable(gathered, own, stride, ranks, RANKS)
    if tl.program_id(0) == 0:
        tl.store(ok, usable != 0)
    # 0 or a quiet NaN.
    start = tl.where(usable != 0, 0, 0x7FC00000).to(tl.float32, bitcast=True)
    i = tl.arange(0, FILL)
    if not ZEROED or usable == 0:
        for j in range(0, SPAN, FILL):
            left = length - first - j
            if left >= FILL:
                tl.store(out + first + j + i, tl.zeros([FILL], tl.float32) + start)
            else:
                tl.store(out + first + j + i, tl.zeros([FILL], tl.float32) + start, mask=i < left)
    begin = place + first
    end = tl.minimum(tl.minimum(begin + SPAN, place + length), size)
    seeker = tl.arange(0, 2 * RANKS)
    message = (seeker // 2).to(tl.int64) * stride
    if common is None:
        lists = gathered + 8 + message
        body = gathered + 8 + capacity
    else:
        lists = common + message * 0
        body = gathered + 8
    targets = tl.where(seeker % 2 == 0, begin, end).to(tl.int32)
    edges = _search(lists, targets, capacity, seeker // 2 < ranks, 2 * RANKS)
    tl.debug_barrier()
    lane = tl.arange(0, 256)
    for rank in range(ranks):
        low = tl.sum(tl.where(seeker == 2 * rank, edges, 0))
        high = tl.sum(tl.where(seeker == 2 * rank + 1, edges, 0))
        offset = rank * stride.to(tl.int64)
        indices = gathered + 8 + offset if common is None else common
        values = (body + offset).to(tl.pointer_type(DTYPE))
        for at in range(low, high, 256):
            inside = at + lane < high
            index = tl.load(indices + at + lane, mask=inside, other=-1)
            inside &= (index >= begin) & (index < end)
            value = tl.load(values + at + lane, mask=inside, other=0).to(tl.float32)
            cells = out + (index - place)
            old = tl.load(cells, mask=inside, other=0)
            tl.store(cells, old + tl.div_rn(value, ranks.to(tl.float32)), mask=inside)
        tl.debug_barrier()


DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
_launch = Launcher(_mean_of_messages, "ok rows", num_warps=WARPS, enable_fp_fusion=False)


def mean_of_messages_triton(
    gathered: Tensor,
    own: Tensor,
    size: int,
    capacity: int,
    values: torch.dtype,
    common: Tensor | None = None,
    into: Target | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Compute `mean_of_messages` in one launch.

    Moves 4 bytes per entry of the mean; per rank 8 bytes and two sectors per sent entry.
    """
    ranks, stride = gathered.shape
    into = Target(size, gathered.device) if into is None else into
    into.wait()
    span = WIDE if into.zeroed else SPAN
    part = tiles_of(into, span)
    ok = torch.empty((), dtype=torch.bool, device=gathered.device)
    words, target = gathered.view(torch.int32), part.gradient
    _launch(
        part.tiles, gathered, target, ok, words, own.view(torch.int32), common, part.rows,
        stride // 4, size, capacity, ranks, part.length, DTYPES[values],
        1 << (ranks - 1).bit_length(), span, FILL, part.aligned, part.pieces, into.zeroed,
    )  # fmt: skip
    return into.out, ok
