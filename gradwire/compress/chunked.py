"""Chunked top-k: the largest entries inside every chunk."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.errors import ConfigError
from gradwire.kernels.chunks import chunk_block
from gradwire.kernels.dispatch import constant
from gradwire.types import Memory, Scan, Sparse


def chunked(
    u: Tensor, k: int, memory: Memory, scan: Scan | None = None, *, chunk: int = 4096
) -> Sparse:
    """The largest entries inside every chunk of 4096, the same number in each.

    What DeMo (Peng et al. 2024) and SparseLoCo (Sarfi et al. 2025) send: inside a chunk an index
    takes 12 bits. A chunk gives max(1, round(chunk k/d)) entries and n is the sum of that: 0.98 k
    at density 0.001, 2.4 k at 0.0001, where a chunk of 4096 has to give one. The rest behind the
    last whole chunk gives its share, at least one. Ties go to the smaller index.
    """
    each, last = shares(k, u.numel(), chunk)
    maxima, block = (scan.maxima, scan.block) if scan is not None else (None, 0)
    indices, values = kernels.chunks(u, chunk, each, last, maxima, block)
    return Sparse(indices, values, constant(indices.numel(), u.device), u.numel())


def shares(k: int, size: int, chunk: int) -> tuple[int, int]:
    """Entries that a whole chunk gives, and the rest behind the last one."""
    if k == 0:
        return 0, 0
    rest = size % chunk
    each, last = (max(1, round(n * k / size)) for n in (chunk, rest))
    return min(chunk, each), min(rest, last)


def chunked_capacity(k: int, size: int, options: Mapping[str, Any]) -> int:
    """Entries that all chunks give together."""
    each, last = shares(k, size, options["chunk"])
    return size // options["chunk"] * each + last


def chunked_block(k: int, size: int, device: torch.device, options: Mapping[str, Any]) -> int:
    """Return a block size that divides the chunk."""
    return chunk_block(options["chunk"], shares(k, size, options["chunk"])[0], device)


def check_chunked(options: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ConfigError for a chunk that cannot give an entry."""
    chunk = options["chunk"]
    if chunk < 1:
        raise ConfigError(f"chunk must be at least 1 entry, got {chunk}")
