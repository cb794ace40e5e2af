"""sketch: write a vector into a Count-Sketch, and estimate every entry from it.

Row j of the table has `columns` cells. Entry i goes into cell h_j(i) with sign s_j(i). Both come
from a 32-bit hash of i and the row's seed, computed on the fly. The estimate of an entry is the
median over the rows of s_j(i) x cell h_j(i) (Charikar, Chen, Farach-Colton 2002).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from gradwire.hashing import fmix32
from gradwire.kernels.dispatch import versions
from gradwire.kernels.scan import ALONE

_STRETCH = 1 << 22
"""Entries at a time on a device; the CPU takes `ALONE`, which stay in the cache and one thread."""


def insert(u: Tensor, columns: int, seeds: Tensor) -> Tensor:
    """Return the sketch of flat, finite fp32 `u`: fp32 [rows, columns]; `seeds` is int32 [rows].

    The cells are sums of 64-bit integers in steps of 2^-31 of the largest |u|. The order of the
    additions therefore does not matter: the bits are the same on every run and every device.
    """
    # max |u| < 2^e. With a factor of 2^(31 - e) even 2^31 entries in one cell stay below 2^62.
    exponent = torch.linalg.vector_norm(u, float("inf")).frexp().exponent.long()
    cells = _insert_on(u.device)(u, columns, seeds, power_of_two(31 - exponent))
    return (cells.double() * power_of_two(exponent - 31)).float()


def query(table: Tensor, seeds: Tensor, size: int, block: int) -> tuple[Tensor, Tensor | None]:
    """Return (magnitudes, maxima): |estimate| of each of `size` entries, and the largest per block.

    table: fp32 [rows, columns], finite, with an odd number of rows.
    block: entries per maximum; 0 for None in place of the maxima.
    """
    return _query_on(table.device)(table, seeds, size, block)


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent as fp64, made from its bits: exact on every device."""
    return ((exponent + 1023) << 52).view(torch.float64)


def insert_torch(u: Tensor, columns: int, seeds: Tensor, factor: Tensor) -> Tensor:
    """Return int64 [rows, columns]: the signed sum of trunc(u x factor) in every cell."""
    table = torch.zeros(seeds.numel(), columns, dtype=torch.int64, device=u.device)
    for entries in _stretches(u.numel(), u.device):
        numbers = (u[entries.start : entries.stop].double() * factor).long()
        for row, (cell, negative) in zip(table, hashes(entries, columns, seeds), strict=True):
            row.index_add_(0, cell, torch.where(negative, -numbers, numbers))
    return table


def query_torch(
    table: Tensor, seeds: Tensor, size: int, block: int
) -> tuple[Tensor, Tensor | None]:
    """Compute `query` with torch ops."""
    columns = table.shape[1]
    out = torch.empty(size, dtype=torch.float32, device=table.device)
    for entries in _stretches(size, table.device):
        rows = []
        for row, (cell, negative) in zip(table, hashes(entries, columns, seeds), strict=True):
            value = row[cell]
            rows.append(torch.where(negative, -value, value))
        torch.abs(median(rows), out=out[entries.start : entries.stop])
    if not block:
        return out, None
    padded = out.new_zeros(-(-size // block) * block)
    padded[:size] = out
    return out, padded.view(-1, block).amax(1)


def _stretches(size: int, device: torch.device) -> Iterator[range]:
    """Yield the entries as ranges, some at a time."""
    step = ALONE if device.type == "cpu" else _STRETCH
    for start in range(0, size, step):
        yield range(start, min(size, start + step))


def hashes(entries: range, columns: int, seeds: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each row the cell of each entry, and True for an entry with a negative sign."""
    numbers = torch.arange(entries.start, entries.stop, dtype=torch.int32, device=seeds.device)
    for seed in seeds:
        hashed = fmix32(numbers ^ seed)
        cell = (((hashed >> 1) & 0x7FFFFFFF).long() * columns) >> 31
        yield cell, (hashed & 1) == 1


def median(rows: list[Tensor]) -> Tensor:
    """Return the median over an odd number of rows, entry by entry, by an odd-even sort."""
    n = len(rows)
    for turn in range(n):
        for i in range(turn % 2, n - 1, 2):
            low, high = torch.minimum(rows[i], rows[i + 1]), torch.maximum(rows[i], rows[i + 1])
            rows[i], rows[i + 1] = low, high
    return rows[n // 2]


_insert_on = versions(insert_torch, triton="gradwire.kernels.triton.sketch.insert_triton")
_query_on = versions(query_torch, triton="gradwire.kernels.triton.sketch.query_triton")
