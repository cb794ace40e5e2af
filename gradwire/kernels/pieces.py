"""How a bundle's gradient arrives and leaves: in pieces, and what one launch must know of them.

DDP hands over slices of its buckets. Slices that follow each other in the bucket and in the bundle
are one piece; what is left goes into a table on the device, made once, so that any number of pieces
is one launch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.types import align

LIMIT = 256
NEVER = 1 << 40
"""The first tile of a column that only fills up the table."""

Piece = tuple[int, Tensor]
"""Where a flat gradient starts in the bundle, and the gradient."""


class Pieces(list[Piece]):
    """Pieces that come again in every step, and the tables that were made of them."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(pieces)
        self.tables: dict[tuple[object, ...], list[PieceTable]] = {}


Run = tuple[int, int, int, int]
"""(place in the bundle, address or 0, gradient entries, entries with what follows them)."""


@dataclass(frozen=True)
class PieceTable:
    """One launch: a single gradient, or `rows` with one column a run, as the kernels read them.

    rows: int64 [5, pieces]: first tile, then the fields of a Run with the address first.
    """

    gradient: Tensor | None
    rows: Tensor | None
    dtype: torch.dtype
    aligned: bool
    pieces: int
    tiles: int
    length: int
    span: int

    @classmethod
    def whole(cls, gradient: Tensor | None, span: int, tile: int) -> "PieceTable":
        """A single piece that begins where the bundle does."""
        length = span if gradient is None else gradient.numel()
        dtype = torch.float32 if gradient is None else gradient.dtype
        return cls(gradient, None, dtype, True, 0, -(-span // tile), length, span)


def piece_tables(
    size: int, device: torch.device, pieces: Sequence[Piece], everything: bool, tile: int
) -> list[PieceTable]:
    """The launches that go over `pieces` of a bundle of `size`, one for each dtype among them.

    `everything`: what no piece covers is looked at too, as if its gradient were zero.
    """
    if not isinstance(pieces, Pieces):
        return _make_tables(size, device, pieces, everything, tile)
    key = size, device, everything, tile
    if key not in pieces.tables:
        pieces.tables[key] = _make_tables(size, device, pieces, everything, tile)
    return pieces.tables[key]


def _make_tables(
    size: int, device: torch.device, pieces: Sequence[Piece], everything: bool, tile: int
) -> list[PieceTable]:
    if len(pieces) == 1:
        place, gradient = pieces[0]
        span = min(size, align(gradient.numel()))
        if place == 0 and (span == size or not everything):
            return [PieceTable.whole(gradient, span, tile)]
    dtypes = dict.fromkeys(g.dtype for _, g in pieces) or [torch.float32]
    return [
        _cached(size, device, pieces, dtype, everything and i == 0, tile)
        for i, dtype in enumerate(dtypes)
    ]


def runs(pieces: Sequence[Piece]) -> list[Run]:
    """The pieces in the order of the bundle, those that continue each other as one."""
    out: list[Run] = []
    for place, gradient in sorted(pieces, key=lambda piece: piece[0]):
        n, address = gradient.numel(), gradient.data_ptr()
        if out:
            first, start, length, span = out[-1]
            follows = start + length * gradient.element_size() == address
            if span == length and first + span == place and follows:
                out[-1] = (first, start, length + n, length + align(n))
                continue
        out.append((place, address, n, align(n)))
    return out


def gaps(size: int, pieces: Sequence[Piece]) -> Iterator[tuple[int, int]]:
    """(start, end) of what no piece covers, padding counted as covered."""
    end = 0
    for place, n in sorted((place, g.numel()) for place, g in pieces):
        if place > end:
            yield end, place
        end = max(end, place + align(n))
    if end < size:
        yield end, size


_tables: dict[tuple[object, ...], PieceTable] = {}


def _cached(
    size: int, device: torch.device, pieces: Sequence[Piece], dtype: torch.dtype,
    everything: bool, tile: int,
) -> PieceTable:  # fmt: skip
    where = tuple((place, g.data_ptr(), g.numel(), g.dtype) for place, g in pieces)
    key = (size, device, dtype, everything, tile, where)
    if key not in _tables:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("these gradients were not seen before: run one step, then capture")
        if len(_tables) >= LIMIT:
            _tables.pop(next(iter(_tables)))
        todo = runs([piece for piece in pieces if piece[1].dtype == dtype])
        if everything:
            todo += [(start, 0, 0, end - start) for start, end in gaps(size, pieces)]
        _tables[key] = _build(size, todo, dtype, tile, device)
    return _tables[key]


def _build(
    size: int, todo: Sequence[Run], dtype: torch.dtype, tile: int, device: torch.device
) -> PieceTable:
    columns, first = [], 0
    for place, address, length, span in todo:
        span = min(span, size - place)
        columns.append((first, address, place, length, span))
        first += -(-span // tile)
    width = 1 << max(0, len(columns) - 1).bit_length()
    columns += [(NEVER, 0, 0, 0, 0)] * (width - len(columns))
    rows = torch.tensor(columns, dtype=torch.int64).t().contiguous()
    if device.type == "cuda":
        rows = rows.pin_memory().to(device, non_blocking=True)
    aligned = all(address % 16 == 0 for _, address, _, _ in todo)
    return PieceTable(None, rows, dtype, aligned, width, first, 0, 0)
