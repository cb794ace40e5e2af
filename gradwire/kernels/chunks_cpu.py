"""chunks on the CPU: the maxima name the few groups of a chunk that can hold its winners."""

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.topk_cpu import array, topk_cpu

ROWS = 1 << 9
"""Chunks handled at a time, so that what they leave stays in the cache."""


def chunks_cpu(
    u: Tensor, chunk: int, each: int, last: int, maxima: Tensor | None = None, group: int = 0
) -> tuple[Tensor, Tensor]:
    """See `chunks`."""
    rows = u.numel() // chunk
    body = array(u[: rows * chunk]).reshape(rows, chunk)
    largest = None
    if maxima is not None and chunk % group == 0 and each * group < chunk:
        wide = chunk // group
        largest = array(maxima)[: rows * wide].reshape(rows, wide)
    parts = []
    for start in range(0, rows, ROWS):
        part = body[start : start + ROWS]
        if largest is None:
            inside = _largest(np.abs(part), each)
        else:
            groups = _largest(largest[start : start + ROWS], each)
            inside = _in_groups(part, groups, group, each)
        parts.append((inside + np.arange(start, start + len(part))[:, None] * chunk).reshape(-1))
    rest = topk_cpu(u[rows * chunk :], last).long() + rows * chunk
    whole = torch.from_numpy(np.concatenate([*parts, rest.numpy()]).astype(np.int32))
    return whole, u[whole]


def _in_groups(part: np.ndarray, groups: np.ndarray, group: int, each: int) -> np.ndarray:
    """The places in its row of the `each` largest entries in the named groups of every row."""
    line = np.arange(len(part))[:, None]
    near = np.abs(part.reshape(len(part), -1, group)[line, groups]).reshape(len(part), -1)
    found = _largest(near, each)
    return groups[line, found // group] * group + found % group


def _largest(x: np.ndarray, k: int) -> np.ndarray:
    """Where the k largest of every row are, ascending; ties go to the smaller place."""
    if k == 0:
        return np.empty((len(x), 0), np.int64)
    width = x.shape[1]
    edge = np.partition(x, width - k, axis=1)[:, width - k, None]
    over = x > edge
    missing = k - over.sum(axis=1, keepdims=True)
    tied = x == edge
    chosen = over | (tied & (tied.cumsum(axis=1) <= missing))
    return np.nonzero(chosen)[1].reshape(-1, k)
