"""sketch: a vector into a Count-Sketch, and every entry's estimate out of it.

Row j of the table has `columns` cells. Entry i goes into cell h_j(i) with sign s_j(i), both from a
32-bit hash of i and the row's seed, computed where it is needed: no tables of hashes. An entry's
estimate is the median over the rows of s_j(i) x cell h_j(i) (Charikar, Chen, Farach-Colton 2002).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from gradwire.hashing import fmix32
from gradwire.kernels.dispatch import versions
from gradwire.kernels.scan import ALONE

STRETCH = 1 << 22
"""Entries at once on a device; on the CPU what stays in the cache and in one thread."""


def insert(u: Tensor, columns: int, seeds: Tensor) -> Tensor:
    """fp32 [rows, columns], the sketch of flat, finite fp32 `u`; `seeds` is int32 [rows].

    The cells are added up as 64-bit integers in steps of 2^-31 of the largest |u|, so that the
    order of the additions does not matter: the same bits on every run and every device.
    """
    # max |u| < 2^e: with a factor of 2^(31 - e) even 2^31 entries in one cell stay below 2^62.
    exponent = torch.linalg.vector_norm(u, float("inf")).frexp().exponent.long()
    cells = _insert_on(u.device)(u, columns, seeds, power_of_two(31 - exponent))
    return (cells.double() * power_of_two(exponent - 31)).float()


def query(table: Tensor, seeds: Tensor, size: int, block: int) -> tuple[Tensor, Tensor | None]:
    """(magnitudes, maxima): |estimate| of each of `size` entries, and of every `block` the largest.

    table: fp32 [rows, columns], finite, an odd number of rows. Without a `block` (0) no maxima.
    """
    return _query_on(table.device)(table, seeds, size, block)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as fp64, made from its bits: exact everywhere."""
    return ((exponent + 1023) << 52).view(torch.float64)


def insert_torch(u: Tensor, columns: int, seeds: Tensor, factor: Tensor) -> Tensor:
    """int64 [rows, columns]: the sum in every cell of trunc(u x factor), with its sign."""
    table = torch.zeros(seeds.numel(), columns, dtype=torch.int64, device=u.device)
    for where in stretches(u.numel(), u.device):
        numbers = (u[where.start : where.stop].double() * factor).long()
        for row, (cell, negative) in zip(table, hashes(where, columns, seeds), strict=True):
            row.index_add_(0, cell, torch.where(negative, -numbers, numbers))
    return table


def query_torch(
    table: Tensor, seeds: Tensor, size: int, block: int
) -> tuple[Tensor, Tensor | None]:
    """See `query`."""
    columns = table.shape[1]
    out = torch.empty(size, dtype=torch.float32, device=table.device)
    for where in stretches(size, table.device):
        rows = []
        for row, (cell, negative) in zip(table, hashes(where, columns, seeds), strict=True):
            value = row[cell]
            rows.append(torch.where(negative, -value, value))
        torch.abs(median(rows), out=out[where.start : where.stop])
    if not block:
        return out, None
    padded = out.new_zeros(-(-size // block) * block)
    padded[:size] = out
    return out, padded.view(-1, block).amax(1)


def stretches(size: int, device: torch.device) -> Iterator[range]:
    """The entries, some at a time."""
    step = ALONE if device.type == "cpu" else STRETCH
    for start in range(0, size, step):
        yield range(start, min(size, start + step))


def hashes(where: range, columns: int, seeds: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each row the cells of the entries in `where`, and whether they count negative."""
    entry = torch.arange(where.start, where.stop, dtype=torch.int32, device=seeds.device)
    for seed in seeds:
        hashed = fmix32(entry ^ seed)
        cell = (((hashed >> 1) & 0x7FFFFFFF).long() * columns) >> 31
        yield cell, (hashed & 1) == 1


def median(rows: list[Tensor]) -> Tensor:
    """The middle one, entry by entry, of an odd number of rows; sorts them pair by pair."""
    n = len(rows)
    for turn in range(n):
        for i in range(turn % 2, n - 1, 2):
            low, high = torch.minimum(rows[i], rows[i + 1]), torch.maximum(rows[i], rows[i + 1])
            rows[i], rows[i + 1] = low, high
    return rows[n // 2]


_insert_on = versions(insert_torch, triton="gradwire.kernels.triton.sketch.insert_triton")
_query_on = versions(query_torch, triton="gradwire.kernels.triton.sketch.query_triton")
