"""chunks: the largest magnitudes inside every chunk of a vector."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.kernels.backend import uses_triton
from gradwire.kernels.chunks_cpu import chunks_cpu
from gradwire.kernels.chunks_torch import chunks_torch


def chunks(
    u: Tensor, chunk: int, each: int, last: int, maxima: Tensor | None = None, group: int = 0
) -> tuple[Tensor, Tensor]:
    """int32 indices, ascending, and values of the `each` largest |u| of every whole chunk.

    `last` (0 where there is none) entries come from the ragged rest behind the whole chunks. Ties
    go to the smaller index. u: flat and finite. each: at most `chunk`. maxima: max |u| of every
    `group` consecutive entries, when a scan left them and `group` divides `chunk`: the winners of a
    chunk lie in the `each` groups of largest maximum (ties to the first), so no others are read.
    """
    return _version(u.device)(u, chunk, each, last, maxima, group)


@functools.cache
def _version(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]]:
    if uses_triton(device):
        from gradwire.kernels.chunks_triton import chunks_triton

        return chunks_triton
    return chunks_cpu if device.type == "cpu" else chunks_torch


FEW = 16
"""Winners a chunk up to which the kernel chooses groups first."""


def chunk_group(chunk: int, each: int, device: torch.device = torch.device("cpu")) -> int:
    """Entries a group for choosing `each` of every chunk; 0 where groups rule out too little."""
    if device.type == "cuda" and each > FEW:
        return 0
    helps = (g for g in (64, 32, 16) if chunk % g == 0 and 4 * each * g <= chunk)
    return next(helps, 0)
