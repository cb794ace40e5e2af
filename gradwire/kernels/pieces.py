"""The pieces in which a bundle's gradient arrives and its mean leaves.

DDP hands over slices of its buckets. Slices that follow each other in the bucket and in the bundle
are merged into one run. The runs go into a table on the device, which a kernel reads. The table is
made once. One launch therefore handles any number of pieces.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.types import align

_LIMIT = 256
"""Tables that are kept at most."""
_NEVER = 1 << 40
"""The first tile of a column that only fills up the table."""

Piece = tuple[int, Tensor]
"""(place in the bundle, flat gradient)."""


class Pieces(list[Piece]):
    """Pieces that come again in every step, with the tables that were made of them.

    A lookup by these objects costs the host nothing per piece. Other lists of pieces are looked up
    by the addresses of their gradients.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(pieces)
        self.tables: dict[tuple[object, ...], list[PieceTable]] = {}


_Run = tuple[int, int, int, int]
"""(place in the bundle, address or 0, gradient entries, these entries and their padding)."""


@dataclass(frozen=True)
class PieceTable:
    """The arguments of one launch: a single gradient, or a table with one column per run.

    rows: int64 [5, pieces]: the first tile, the address, the place in the bundle, the gradient
    entries, and the entries with padding. gradient: None if there is a table.
    aligned: True if every address is a multiple of 16. pieces: columns of the table, 0 without a
    table.
    length: gradient entries of a single gradient. span: the entries with padding.
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
        """Return the arguments for a single piece that begins at the start of the bundle.

        gradient: None for a launch that only reads the bundle.
        """
        length = span if gradient is None else gradient.numel()
        dtype = torch.float32 if gradient is None else gradient.dtype
        return cls(gradient, None, dtype, True, 0, -(-span // tile), length, span)


def piece_tables(
    size: int, device: torch.device, pieces: Sequence[Piece], everything: bool, tile: int
) -> list[PieceTable]:
    """Return the launches that handle `pieces` of a bundle of `size`, one per dtype among them.

    everything: entries that no piece covers are scanned too, as if their gradient were zero.
    tile: the entries per program of the kernel.
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
        _table_by_address(size, device, pieces, dtype, everything and i == 0, tile)
        for i, dtype in enumerate(dtypes)
    ]


def merge_runs(pieces: Sequence[Piece]) -> list[_Run]:
    """Return the pieces in the order of the bundle, pieces that continue each other merged."""
    out: list[_Run] = []
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
    """Yield (start, end) of each part that no piece covers; padding counts as covered."""
    end = 0
    for place, n in sorted((place, g.numel()) for place, g in pieces):
        if place > end:
            yield end, place
        end = max(end, place + align(n))
    if end < size:
        yield end, size


# By address, for callers that make a new list of pieces in every step. `Pieces.tables` spares the
# callers on the hot path this key, which takes the host about a microsecond per piece.
_tables: dict[tuple[object, ...], PieceTable] = {}


def _table_by_address(
    size: int, device: torch.device, pieces: Sequence[Piece], dtype: torch.dtype,
    everything: bool, tile: int,
) -> PieceTable:  # fmt: skip
    addresses = tuple((place, g.data_ptr(), g.numel(), g.dtype) for place, g in pieces)
    key = (size, device, dtype, everything, tile, addresses)
    if key not in _tables:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # The copy of a table into a graph would read host memory that is gone at the replay.
            raise RuntimeError("these gradients were not seen before: run one step, then capture")
        if len(_tables) >= _LIMIT:
            _tables.pop(next(iter(_tables)))
        table_runs = merge_runs([piece for piece in pieces if piece[1].dtype == dtype])
        if everything:
            table_runs += [(start, 0, 0, end - start) for start, end in gaps(size, pieces)]
        _tables[key] = _build_table(size, table_runs, dtype, tile, device)
    return _tables[key]


def _build_table(
    size: int, table_runs: Sequence[_Run], dtype: torch.dtype, tile: int, device: torch.device
) -> PieceTable:
    columns, first = [], 0
    for place, address, length, span in table_runs:
        span = min(span, size - place)
        columns.append((first, address, place, length, span))
        first += -(-span // tile)
    width = 1 << max(0, len(columns) - 1).bit_length()
    columns += [(_NEVER, 0, 0, 0, 0)] * (width - len(columns))
    rows = torch.tensor(columns, dtype=torch.int64).t().contiguous()
    if device.type == "cuda":
        rows = rows.pin_memory().to(device, non_blocking=True)
    aligned = all(address % 16 == 0 for _, address, _, _ in table_runs)
    return PieceTable(None, rows, dtype, aligned, width, first, 0, 0)
