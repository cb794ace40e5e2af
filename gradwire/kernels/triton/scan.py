"""scan on CUDA: one pass at the speed of memory, with the block maxima on the way.

A program takes one tile of one piece. Only the last tile of a piece is masked, so that sizes that
are not a multiple of the tile cost nothing.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from gradwire.kernels.last_selection import LastSelection
from gradwire.kernels.pieces import Piece, PieceTable, piece_tables
from gradwire.kernels.triton.bits import INFINITY, is_bad, magnitude, rounded
from gradwire.kernels.triton.launch import Launcher
from gradwire.kernels.triton.select.counts import LOW, count_tile
from gradwire.kernels.triton.select.sizes import UNIT, units_per_count
from gradwire.kernels.triton.select.turns import LAST_INDEX
from gradwire.kernels.triton.workspace import true_flag

TILE = 1024
WARPS = 4
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def locate_tile(rows, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, PIECES: tl.constexpr):
    """Find this program's tile, and the gradient, place and two lengths of its piece."""
    program = tl.program_id(0)
    piece = tl.sum((tl.load(rows + tl.arange(0, PIECES)) <= program).to(tl.int32)) - 1
    tile = (program - tl.load(rows + piece)).to(tl.int32)
    gradient = tl.load(rows + PIECES + piece).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        gradient = tl.multiple_of(gradient, 16)
    place = tl.multiple_of(tl.load(rows + 2 * PIECES + piece), 64)
    length = tl.load(rows + 3 * PIECES + piece)
    return tile, gradient, place, length, tl.load(rows + 4 * PIECES + piece)


@triton.jit
def entries_left(end, start, TILE: tl.constexpr):
    """Return the number of the tile's entries that come before `end`, in 32 bits."""
    return tl.minimum(tl.maximum(end - start, 0), TILE).to(tl.int32)


@triton.jit
def store_maxima(bits, maxima, first, left, finite, bad, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Store one maximum per row, if wanted; clear `finite` if a row held a bad entry."""
    row = tl.arange(0, ROWS)
    if maxima is not None:
        each = tl.max(bits, axis=1)
        if maxima.dtype.element_ty == tl.int16:
            each = (each >> LOW).to(tl.int16)
        else:
            each = each.to(tl.float32, bitcast=True)
        tl.store(maxima + first + row, each, mask=row * BLOCK < left)
    if finite is not None:
        wrong = tl.max(bad.to(tl.int32), axis=1) != 0
        tl.store(finite + row * 0, row < 0, mask=wrong)


@triton.jit
def _tile(
    residual, gradient, maxima, unscale, finite, edge, last, place, start, length, span,
    BLOCK: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = TILE // BLOCK
    entry = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    left = entries_left(span, start, TILE)
    here = residual + place + start + entry
    if MASKED:
        old = tl.load(here, mask=entry < left, other=0)
    else:
        old = tl.load(here)
    if edge is not None:
        size = magnitude(old)
        index = (place + start).to(tl.int32) + entry
        sent = (size > edge) | ((size == edge) & (index <= last))
        old = tl.where(sent, 0.0, old).to(old.dtype)
    u = old
    bad = entry < 0
    if gradient is not None:
        if MASKED:
            has_gradient = entry < entries_left(length, start, TILE)
            added = tl.load(gradient + start + entry, mask=has_gradient, other=0)
        else:
            added = tl.load(gradient + start + entry)
        added = added.to(tl.float32)
        if unscale is not None:
            added *= tl.load(unscale)
        total = old.to(tl.float32) + added
        u = rounded(total, old.dtype)
        # A NaN may look finite once it is rounded.
        bad = (magnitude(total) >= INFINITY) | is_bad(u, old)
        u = tl.where(bad, old, u)
        if MASKED:
            tl.store(here, u, mask=entry < left)
        else:
            tl.store(here, u)
    store_maxima(magnitude(u), maxima, (place + start) // BLOCK, left, finite, bad, BLOCK, ROWS)


@triton.jit(
    do_not_specialize=["every", "length", "span"],
    do_not_specialize_on_alignment=["unscale", "finite", "skipped"],
)
def _scan(
    residual, gradient, maxima, counts, unscale, finite, rows, record, skipped, every, length, span,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, UNIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
    tile = tl.program_id(0)
    place = tl.zeros([], tl.int64)
    if PIECES:
        tile, gradient, place, length, span = locate_tile(rows, DTYPE, ALIGNED, PIECES)
    start = tile.to(tl.int64) * TILE
    edge = None
    last = None
    if skipped is not None:
        # No magnitude is above 0x7FFFFFFF, so nothing is cleared after a skipped step.
        edge = tl.where(tl.load(skipped) == 0, tl.load(record), 0x7FFFFFFF)
        last = tl.load(record + LAST_INDEX)
    if start + TILE <= tl.minimum(length, span):
        _tile(
            residual, gradient, maxima, unscale, finite, edge, last, place, start, length, span,
            BLOCK, TILE, False,
        )  # fmt: skip
    else:
        _tile(
            residual, gradient, maxima, unscale, finite, edge, last, place, start, length, span,
            BLOCK, TILE, True,
        )  # fmt: skip
    if counts is not None:
        left = entries_left(span, start, TILE)
        count_tile(counts, record, maxima, place + start, left, every, BLOCK, TILE, UNIT)


_launch = Launcher(
    _scan, "counts unscale finite rows record skipped", overlap_launch=True,
    num_warps=WARPS, enable_fp_fusion=False,
)  # fmt: skip


def scan_triton(
    residual: Tensor,
    pieces: Sequence[Piece],
    maxima: Tensor | None,
    block: int,
    unscale: Tensor | None = None,
    last_selection: LastSelection | None = None,
    skipped: Tensor | None = None,
) -> Tensor:
    """Compute `scan` in one launch per dtype.

    Moves 12 bytes per entry for fp32 gradients, and 4 / block for maxima.
    """
    finite = true_flag(residual.device)
    counts = None if last_selection is None or maxima is None else last_selection.counts_to_fill()
    record = None if last_selection is None else last_selection.record
    for part in piece_tables(residual.numel(), residual.device, pieces, maxima is not None, TILE):
        scan_part(residual, part, maxima, block, counts, unscale, finite, record, skipped)
    return finite


def scan_part(
    residual: Tensor,
    part: PieceTable,
    maxima: Tensor | None,
    block: int,
    counts: Tensor | None = None,
    unscale: Tensor | None = None,
    finite: Tensor | None = None,
    record: Tensor | None = None,
    skipped: Tensor | None = None,
) -> None:
    """Launch one pass over the tiles of `part`."""
    gradient = part.gradient
    _launch(
        part.tiles, residual, residual, gradient, maxima, counts, unscale, finite, part.rows,
        record, skipped, units_per_count(residual.numel()), part.length, part.span,
        DTYPES[part.dtype], part.aligned, part.pieces, block, TILE, UNIT,
    )  # fmt: skip


def block_maxima(u: Tensor, block: int) -> Tensor:
    """Return max |u| of every `block` consecutive entries; the last block may be shorter."""
    out = torch.empty(triton.cdiv(u.numel(), block), dtype=torch.float32, device=u.device)
    scan_part(u, PieceTable.whole(None, u.numel(), TILE), out, block)
    return out
