"""Chunks: parameters cut into squares of 64 x 64, as DeMo and SparseLoCo cut them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.workbench.rivals.exchange import Shape

SIDE = 64


def chunk_side(length: int, side: int = SIDE) -> int:
    """Return the largest divisor of a length that is at most `side`."""
    return next(n for n in range(min(length, side), 0, -1) if length % n == 0)


@dataclass(frozen=True)
class _Place:
    """A parameter's part of the vector, as `down` x `across` chunks."""

    begin: int
    size: int
    down: int
    across: int


class Chunks:
    """Parameters of one model as chunks [..., chunks, height, width], by the size of the chunks.

    A vector is a chunk of one row; further dimensions count as columns. A length that `side` does
    not divide has its largest divisor below `side`, so no chunk is padded.
    """

    def __init__(self, shapes: Sequence[Shape], side: int = SIDE) -> None:
        self.groups: dict[tuple[int, int], list[_Place]] = {}
        begin = 0
        for shape in shapes:
            rows = shape[0] if len(shape) > 1 else 1
            size = math.prod(shape)
            columns = size // rows
            height, width = chunk_side(rows, side), chunk_side(columns, side)
            place = _Place(begin, size, rows // height, columns // width)
            self.groups.setdefault((height, width), []).append(place)
            begin += size
        self.entries = begin

    def cut(self, vectors: Tensor) -> dict[tuple[int, int], Tensor]:
        """Return the chunks of vectors [..., entries]."""
        return {
            size: torch.cat([_cut(vectors, place, *size) for place in places], -3)
            for size, places in self.groups.items()
        }

    def join(self, chunks: dict[tuple[int, int], Tensor]) -> Tensor:
        """Return the vectors whose chunks these are."""
        first = next(iter(chunks.values()))
        out = first.new_empty(*first.shape[:-3], self.entries)
        for size, places in self.groups.items():
            counts = [place.down * place.across for place in places]
            for place, part in zip(places, chunks[size].split(counts, -3), strict=True):
                _join(out, part, place, *size)
        return out


def _cut(vectors: Tensor, place: _Place, height: int, width: int) -> Tensor:
    part = vectors.narrow(-1, place.begin, place.size)
    grid = part.unflatten(-1, (place.down, height, place.across, width))
    return grid.transpose(-3, -2).flatten(-4, -3)


def _join(out: Tensor, part: Tensor, place: _Place, height: int, width: int) -> None:
    grid = part.unflatten(-3, (place.down, place.across)).transpose(-3, -2)
    out.narrow(-1, place.begin, place.size).copy_(grid.flatten(-4))


def cosines(length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the orthogonal matrix of the discrete cosine transform, DCT-II."""
    place = torch.arange(length, dtype=torch.float64) + 0.5
    wave = torch.arange(length, dtype=torch.float64).unsqueeze(1)
    matrix = torch.cos(math.pi / length * wave * place) * math.sqrt(2 / length)
    matrix[0] /= math.sqrt(2)
    return matrix.to(device, dtype)


class Cosine:
    """The two-dimensional cosine transform of chunks; each matrix is made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, torch.device, torch.dtype], Tensor] = {}

    def forward(self, chunks: Tensor) -> Tensor:
        """Return the coefficients of chunks [..., height, width]."""
        left, right = (self._matrix(n, chunks) for n in chunks.shape[-2:])
        return left @ chunks @ right.T

    def back(self, coefficients: Tensor) -> Tensor:
        """Return the chunks of these coefficients."""
        left, right = (self._matrix(n, coefficients) for n in coefficients.shape[-2:])
        return left.T @ coefficients @ right

    def _matrix(self, length: int, like: Tensor) -> Tensor:
        key = length, like.device, like.dtype
        if key not in self._made:
            self._made[key] = cosines(*key)
        return self._made[key]


def index_bits(entries: int) -> int:
    """Return the bits of an index into a chunk: 12 for 64 x 64."""
    return max(1, (entries - 1).bit_length())
