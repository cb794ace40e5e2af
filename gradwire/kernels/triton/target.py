"""Zero a target on CUDA: one launch for any number of pieces."""

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from gradwire.kernels.pieces import PieceTable, piece_tables
from gradwire.kernels.triton.launch import Launcher
from gradwire.kernels.triton.scan import locate_tile

if TYPE_CHECKING:
    from gradwire.kernels.side_stream import Target

TILE = 8192


@triton.jit(do_not_specialize=["length"])
def _zero(out, rows, length, ALIGNED: tl.constexpr, PIECES: tl.constexpr, TILE: tl.constexpr):
    tile = tl.program_id(0)
    if PIECES:
        tile, out, _, length, _ = locate_tile(rows, tl.float32, ALIGNED, PIECES)
    start = tile.to(tl.int64) * TILE
    i = tl.arange(0, TILE)
    nothing = tl.zeros([TILE], tl.float32)
    if start + TILE <= length:
        tl.store(out + start + i, nothing)
    else:
        tl.store(out + start + i, nothing, mask=i < length - start)


_launch = Launcher(_zero, "rows", num_warps=8)


def tiles_of(target: "Target", tile: int) -> PieceTable:
    """Return the one launch that covers the target, in tiles of `tile` entries."""
    if target.out is not None:
        return PieceTable.whole(target.out, target.size + 1, tile)
    (part,) = piece_tables(target.size, target.device, target.pieces, False, tile)
    return part


def zero_triton(target: "Target") -> None:
    """Zero the target; it moves 4 bytes per entry."""
    part = tiles_of(target, TILE)
    out = part.gradient
    on = target.pieces[0][1] if target.out is None else target.out
    _launch(part.tiles, on, out, part.rows, part.length, part.aligned, part.pieces, TILE)
