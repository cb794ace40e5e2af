"""momentum on CUDA: one pass that reads three streams and writes two."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.last_selection import LastSelection
from gradwire.kernels.pieces import Piece, piece_tables
from gradwire.kernels.triton.bits import is_bad, magnitude
from gradwire.kernels.triton.launch import Launcher
from gradwire.kernels.triton.scan import DTYPES, entries_left, locate_tile, store_maxima
from gradwire.kernels.triton.select.counts import count_tile
from gradwire.kernels.triton.select.sizes import UNIT, units_per_count
from gradwire.kernels.triton.workspace import true_flag

TILE = 2048
WARPS = 8


@triton.jit
def _tile(
    residual, velocity, gradient, maxima, unscale, finite, factor, place, start, length, span,
    BLOCK: tl.constexpr, TILE: tl.constexpr, NESTEROV: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = TILE // BLOCK
    entry = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    left = entries_left(span, start, TILE)
    here = place + start
    if MASKED:
        has_gradient = entry < entries_left(length, start, TILE)
        kept = tl.load(residual + here + entry, mask=entry < left, other=0)
        speed = tl.load(velocity + here + entry, mask=has_gradient, other=0)
        added = tl.load(gradient + start + entry, mask=has_gradient, other=0).to(tl.float32)
    else:
        kept = tl.load(residual + here + entry)
        speed = tl.load(velocity + here + entry)
        added = tl.load(gradient + start + entry).to(tl.float32)
    if unscale is not None:
        added *= tl.load(unscale)
    if NESTEROV:
        faster = (speed + added) * factor
        u = kept + (faster + added)
    else:
        faster = speed * factor + added
        u = kept + faster
    bad = is_bad(faster, speed) | is_bad(u, tl.abs(kept) + tl.abs(speed))
    u = tl.where(bad, kept, u)
    if MASKED:
        tl.store(residual + here + entry, u, mask=has_gradient)
        tl.store(velocity + here + entry, tl.where(bad, speed, faster), mask=has_gradient)
    else:
        tl.store(residual + here + entry, u)
        tl.store(velocity + here + entry, tl.where(bad, speed, faster))
    store_maxima(magnitude(u), maxima, here // BLOCK, left, finite, bad, BLOCK, ROWS)


@triton.jit(
    do_not_specialize=["every", "length", "span"],
    do_not_specialize_on_alignment=["unscale", "finite"],
)
def _momentum(
    residual, velocity, gradient, maxima, counts, record, unscale, finite, factor, rows, every,
    length, span,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, UNIT: tl.constexpr, NESTEROV: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    place = tl.zeros([], tl.int64)
    if PIECES:
        tile, gradient, place, length, span = locate_tile(rows, DTYPE, ALIGNED, PIECES)
    start = tile.to(tl.int64) * TILE
    if start + TILE <= tl.minimum(length, span):
        _tile(
            residual, velocity, gradient, maxima, unscale, finite, factor, place, start, length,
            span, BLOCK, TILE, NESTEROV, False,
        )  # fmt: skip
    else:
        _tile(
            residual, velocity, gradient, maxima, unscale, finite, factor, place, start, length,
            span, BLOCK, TILE, NESTEROV, True,
        )  # fmt: skip
    if counts is not None:
        left = entries_left(span, start, TILE)
        count_tile(counts, record, maxima, place + start, left, every, BLOCK, TILE, UNIT)


_launch = Launcher(
    _momentum, "counts record unscale finite factor rows", num_warps=WARPS, enable_fp_fusion=False
)


def momentum_triton(
    residual: Tensor,
    velocity: Tensor,
    pieces: Sequence[Piece],
    maxima: Tensor | None,
    block: int,
    factor: float,
    unscale: Tensor | None = None,
    nesterov: bool = False,
    last_selection: LastSelection | None = None,
) -> Tensor:
    """Compute `momentum` in one launch per dtype.

    Moves 20 bytes per entry for fp32 gradients.
    """
    finite = true_flag(residual.device)
    counts = None if last_selection is None or maxima is None else last_selection.counts_to_fill()
    record = None if counts is None or last_selection is None else last_selection.record
    for part in piece_tables(residual.numel(), residual.device, pieces, maxima is not None, TILE):
        gradient = part.gradient
        _launch(
            part.tiles, residual, residual, velocity, gradient, maxima, counts, record, unscale,
            finite, factor, part.rows, units_per_count(residual.numel()), part.length, part.span,
            DTYPES[part.dtype], part.aligned, part.pieces, block, TILE, UNIT, nesterov,
        )  # fmt: skip
    return finite
