"""Chunked top-k: the largest entries inside every chunk."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compress.method import Method
from gradwire.errors import ConfigError
from gradwire.kernels.chunks import chunk_block
from gradwire.kernels.dispatch import constant
from gradwire.types import Memory, Scan, Sparse


def chunked(
    u: Tensor, k: int, memory: Memory, scan: Scan | None = None, *, chunk: int = 4096
) -> Sparse:
    """The largest entries inside every chunk of 4096, the same number in each.

    DeMo (Peng et al. 2024) and SparseLoCo (Sarfi et al. 2025) send such entries. Inside a chunk an
    index takes 12 bits. A chunk gives max(1, round(chunk k/d)) entries, and n is the sum over the
    chunks. n is 0.98 k at density 0.001. At 0.0001 n is 2.4 k, because a chunk of 4096 must give
    one entry. The remainder behind the last whole chunk gives its share, at least one entry. Ties
    go to the smaller index.
    """
    each, last = _entries_per_chunk(k, u.numel(), chunk)
    maxima, block = (scan.maxima, scan.block) if scan is not None else (None, 0)
    indices, values = kernels.chunks(u, chunk, each, last, maxima, block)
    return Sparse(indices, values, constant(indices.numel(), u.device), u.numel())


def _entries_per_chunk(k: int, size: int, chunk: int) -> tuple[int, int]:
    """Return the entries of a whole chunk, and of the remainder behind the last chunk."""
    if k == 0:
        return 0, 0
    remainder = size % chunk
    each, last = (max(1, round(n * k / size)) for n in (chunk, remainder))
    return min(chunk, each), min(remainder, last)


def chunked_capacity(k: int, size: int, options: Mapping[str, Any]) -> int:
    """Return the entries that all chunks give together."""
    each, last = _entries_per_chunk(k, size, options["chunk"])
    return size // options["chunk"] * each + last


def chunked_block(k: int, size: int, device: torch.device, options: Mapping[str, Any]) -> int:
    """Return a block size that divides the chunk."""
    return chunk_block(options["chunk"], _entries_per_chunk(k, size, options["chunk"])[0], device)


def check_chunked(options: Mapping[str, Any], user_options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a chunk that cannot give an entry."""
    chunk = options["chunk"]
    if chunk < 1:
        raise ConfigError(f"chunk must be at least 1 entry, got {chunk}")


METHOD = Method(chunked, capacity=chunked_capacity, block=chunked_block, check=check_chunked)
