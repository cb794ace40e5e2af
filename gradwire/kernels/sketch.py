"""sketch: a vector into a Count-Sketch, and every entry's estimate out of it.

Row j of the table has `columns` cells. Entry i goes into cell h_j(i) with sign s_j(i), both from a
32-bit hash of i and the row's seed, computed where it is needed: no tables of hashes. An entry's
estimate is the median over the rows of s_j(i) x cell h_j(i) (Charikar, Chen, Farach-Colton 2002).
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.kernels.backend import uses_triton
from gradwire.kernels.sketch_torch import insert_torch, query_torch


def insert(u: Tensor, columns: int, seeds: Tensor) -> Tensor:
    """fp32 [rows, columns], the sketch of flat, finite fp32 `u`; `seeds` is int32 [rows].

    The cells are added up as 64-bit integers in steps of 2^-31 of the largest |u|, so that the
    order of the additions does not matter: the same bits on every run and every device.
    """
    # max |u| < 2^e: with a factor of 2^(31 - e) even 2^31 entries in one cell stay below 2^62.
    exponent = torch.linalg.vector_norm(u, float("inf")).frexp().exponent.long()
    cells = _insert(u.device)(u, columns, seeds, power_of_two(31 - exponent))
    return (cells.double() * power_of_two(exponent - 31)).float()


def query(table: Tensor, seeds: Tensor, size: int, group: int) -> tuple[Tensor, Tensor | None]:
    """(magnitudes, maxima): |estimate| of each of `size` entries, and of every `group` the largest.

    table: fp32 [rows, columns], finite, an odd number of rows. Without a `group` (0) no maxima.
    """
    return _query(table.device)(table, seeds, size, group)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as fp64, made from its bits: exact everywhere."""
    return ((exponent + 1023) << 52).view(torch.float64)


@functools.cache
def _insert(device: torch.device) -> Callable[..., Tensor]:
    if uses_triton(device):
        from gradwire.kernels.sketch_triton import insert_triton

        return insert_triton
    return insert_torch


@functools.cache
def _query(device: torch.device) -> Callable[..., tuple[Tensor, Tensor | None]]:
    if uses_triton(device):
        from gradwire.kernels.sketch_triton import query_triton

        return query_triton
    return query_torch
