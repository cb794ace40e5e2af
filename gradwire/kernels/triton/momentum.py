"""momentum on CUDA: one pass over five streams."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.last_selection import Edge
from gradwire.kernels.pieces import Piece, table
from gradwire.kernels.triton.bits import INFINITY, magnitude
from gradwire.kernels.triton.launch import Launcher
from gradwire.kernels.triton.scan import DTYPES, largest, locate, rest
from gradwire.kernels.triton.select.counts import tally
from gradwire.kernels.triton.select.sizes import UNIT, every
from gradwire.kernels.triton.workspace import flag

TILE = 2048
WARPS = 8


@triton.jit
def _tile(
    residual, velocity, gradient, maxima, unscale, finite, factor, place, start, length, span,
    GROUP: tl.constexpr, TILE: tl.constexpr, NESTEROV: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = TILE // GROUP
    entry = tl.arange(0, ROWS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    left = rest(span, start, TILE)
    here = place + start
    if MASKED:
        mine = entry < rest(length, start, TILE)
        kept = tl.load(residual + here + entry, mask=entry < left, other=0)
        speed = tl.load(velocity + here + entry, mask=mine, other=0)
        given = tl.load(gradient + start + entry, mask=mine, other=0).to(tl.float32)
    else:
        kept = tl.load(residual + here + entry)
        speed = tl.load(velocity + here + entry)
        given = tl.load(gradient + start + entry).to(tl.float32)
    if unscale is not None:
        given *= tl.load(unscale)
    if NESTEROV:
        faster = (speed + given) * factor
        u = kept + (faster + given)
    else:
        faster = speed * factor + given
        u = kept + faster
    bad = (magnitude(faster) >= INFINITY) | (magnitude(u) >= INFINITY)
    u = tl.where(bad, kept, u)
    if MASKED:
        tl.store(residual + here + entry, u, mask=mine)
        tl.store(velocity + here + entry, tl.where(bad, speed, faster), mask=mine)
    else:
        tl.store(residual + here + entry, u)
        tl.store(velocity + here + entry, tl.where(bad, speed, faster))
    largest(magnitude(u), maxima, here // GROUP, left, finite, bad, GROUP, ROWS)


@triton.jit(do_not_specialize=["factor", "every", "length", "span"])
def _momentum(
    residual, velocity, gradient, maxima, counts, words, unscale, finite, factor, rows, every,
    length, span,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, PIECES: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr, UNIT: tl.constexpr, NESTEROV: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    place = tl.zeros([], tl.int64)
    if PIECES:
        tile, gradient, place, length, span = locate(rows, DTYPE, ALIGNED, PIECES)
    start = tile.to(tl.int64) * TILE
    if start + TILE <= tl.minimum(length, span):
        _tile(
            residual, velocity, gradient, maxima, unscale, finite, factor, place, start, length,
            span, GROUP, TILE, NESTEROV, False,
        )  # fmt: skip
    else:
        _tile(
            residual, velocity, gradient, maxima, unscale, finite, factor, place, start, length,
            span, GROUP, TILE, NESTEROV, True,
        )  # fmt: skip
    if counts is not None:
        left = rest(span, start, TILE)
        tally(counts, words, residual, maxima, place + start, left, every, GROUP, TILE, UNIT)


_launch = Launcher(_momentum, num_warps=WARPS, enable_fp_fusion=False)


def momentum_triton(
    residual: Tensor,
    velocity: Tensor,
    pieces: Sequence[Piece],
    maxima: Tensor | None,
    group: int,
    factor: float,
    unscale: Tensor | None = None,
    nesterov: bool = False,
    edge: Edge | None = None,
) -> Tensor:
    """See `momentum`. One launch; moves 20 bytes an entry for fp32 gradients."""
    finite = flag(residual.device)
    counts = None if edge is None or maxima is None else edge.counting()
    words = None if counts is None or edge is None else edge.words
    for part in table(residual.numel(), residual.device, pieces, maxima is not None, TILE):
        given = part.gradient
        key = (
            group, part.pieces, part.dtype, part.aligned, unscale is None, nesterov,
            residual.data_ptr() % 16, velocity.data_ptr() % 16,
            None if given is None else given.data_ptr() % 16,
            None if maxima is None else (maxima.dtype, maxima.data_ptr() % 16), counts is None,
        )  # fmt: skip
        _launch(
            part.tiles, key, residual, residual, velocity, given, maxima, counts, words, unscale,
            finite, factor, part.rows, every(residual.numel()), part.length, part.span,
            DTYPES[part.dtype], part.aligned, part.pieces, group, TILE, UNIT, nesterov,
        )  # fmt: skip
    return finite
