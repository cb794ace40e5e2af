"""chunks: choose the largest magnitudes inside every chunk of a vector."""

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.dispatch import versions
from gradwire.kernels.select import as_numpy, topk_cpu, topk_torch

FEW = 16
"""The kernel chooses blocks first for at most this many winners per chunk."""
_ROWS = 1 << 9
"""Chunks handled at a time, so that intermediate arrays stay in the cache."""


def chunks(
    u: Tensor, chunk: int, each: int, last: int, maxima: Tensor | None = None, block: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the `each` largest |u| of every whole chunk: int32 indices, ascending, and values.

    Ties go to the smaller index. `last` more entries come from the shorter chunk behind the whole
    chunks; `last` is 0 without such a chunk.
    u: flat and finite. each: at most `chunk`.
    maxima: max |u| of every `block` consecutive entries, if a scan left them and `block` divides
    `chunk`. The winners of a chunk lie in the `each` blocks of largest maximum (ties to the first).
    Only these blocks are then read.
    """
    return _chunks_on(u.device)(u, chunk, each, last, maxima, block)


def chunk_block(chunk: int, each: int, device: torch.device = torch.device("cpu")) -> int:
    """Return the entries per block for choosing `each` of every chunk; 0 if blocks do not help."""
    if device.type == "cuda" and each > FEW:
        return 0
    helps = (b for b in (64, 32, 16) if chunk % b == 0 and 4 * each * b <= chunk)
    return next(helps, 0)


def chunks_cpu(
    u: Tensor, chunk: int, each: int, last: int, maxima: Tensor | None = None, block: int = 0
) -> tuple[Tensor, Tensor]:
    """Compute `chunks` with numpy."""
    rows = u.numel() // chunk
    body = as_numpy(u[: rows * chunk]).reshape(rows, chunk)
    largest = None
    if maxima is not None and chunk % block == 0 and each * block < chunk:
        wide = chunk // block
        largest = as_numpy(maxima)[: rows * wide].reshape(rows, wide)
    parts = []
    for start in range(0, rows, _ROWS):
        part = body[start : start + _ROWS]
        if largest is None:
            inside = _largest(np.abs(part), each)
        else:
            blocks = _largest(largest[start : start + _ROWS], each)
            inside = _in_blocks(part, blocks, block, each)
        parts.append((inside + np.arange(start, start + len(part))[:, None] * chunk).reshape(-1))
    tail = topk_cpu(u[rows * chunk :], last).long() + rows * chunk
    indices = torch.from_numpy(np.concatenate([*parts, tail.numpy()]).astype(np.int32))
    return indices, u[indices]


def _in_blocks(part: np.ndarray, blocks: np.ndarray, block: int, each: int) -> np.ndarray:
    """Return the places in each row of the `each` largest entries in the row's named blocks."""
    line = np.arange(len(part))[:, None]
    magnitude = np.abs(part.reshape(len(part), -1, block)[line, blocks]).reshape(len(part), -1)
    places = _largest(magnitude, each)
    return blocks[line, places // block] * block + places % block


def _largest(x: np.ndarray, k: int) -> np.ndarray:
    """Return the places of the k largest of every row, ascending; ties go to the smaller place."""
    if k == 0:
        return np.empty((len(x), 0), np.int64)
    width = x.shape[1]
    edge = np.partition(x, width - k, axis=1)[:, width - k, None]
    over = x > edge
    missing = k - over.sum(axis=1, keepdims=True)
    tied = x == edge
    chosen = over | (tied & (tied.cumsum(axis=1) <= missing))
    return np.nonzero(chosen)[1].reshape(-1, k)


def chunks_torch(
    u: Tensor, chunk: int, each: int, last: int, maxima: Tensor | None = None, block: int = 0
) -> tuple[Tensor, Tensor]:
    """Compute `chunks` by a stable sort of every chunk."""
    rows = u.numel() // chunk
    body = u[: rows * chunk].view(rows, chunk).abs()
    order = body.sort(dim=1, descending=True, stable=True).indices[:, :each]
    starts = torch.arange(0, rows * chunk, chunk, dtype=torch.int64, device=u.device)
    whole = (order.sort(dim=1).values + starts[:, None]).view(-1).to(torch.int32)
    tail = topk_torch(u[rows * chunk :], last) + rows * chunk
    indices = torch.cat([whole, tail.to(torch.int32)])
    return indices, u[indices]


_chunks_on = versions(
    chunks_torch, cpu=chunks_cpu, triton="gradwire.kernels.triton.chunks.chunks_triton"
)
