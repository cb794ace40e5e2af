"""topk on the CPU: group maxima rule out nearly everything before anything is compared exactly.

The k-th largest group maximum t is never above the k-th largest magnitude (k groups hold an entry
of at least t), so a group whose maximum is below t cannot hold a winner. What is left is handled by
numpy, in one thread: it is little, and torch's threads wait for each other where cores are busy.
"""

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.scan_cpu import BLOCK


def topk_cpu(u: Tensor, k: int, maxima: Tensor | None = None, group: int = 0) -> Tensor:
    """See `topk`."""
    from gradwire.kernels.topk import group_size

    if k == 0:
        return torch.empty(0, dtype=torch.int32)
    if maxima is None:
        group = group_size(u.numel(), k)
        maxima = group_maxima(u, group) if group else None
    entries = array(u)
    if maxima is None or maxima.numel() <= k:
        return exact(np.arange(entries.size), np.abs(entries), k)
    largest = array(maxima)
    bound = kth_largest(largest, k)
    where, magnitude = candidates(entries, np.flatnonzero(largest >= bound), group, bound)
    return exact(where, magnitude, k)


def array(x: Tensor) -> np.ndarray:
    """The same memory; a copy for bf16, which numpy does not know."""
    return x.float().numpy() if x.dtype == torch.bfloat16 else x.numpy()


def candidates(
    u: np.ndarray,
    groups: np.ndarray,
    group: int,
    bound: float | np.floating,
    passes: np.ufunc = np.greater_equal,
) -> tuple[np.ndarray, np.ndarray]:
    """Where the entries that pass `bound` are in the named groups, ascending, and their size."""
    rows = u.size // group
    whole = groups[groups < rows]
    magnitude = np.abs(u[: rows * group].reshape(rows, group)[whole]).reshape(-1)
    near = np.flatnonzero(passes(magnitude, bound))
    where = whole[near // group] * group + near % group
    magnitude = magnitude[near]
    if whole.size < groups.size:
        tail = np.abs(u[rows * group :])
        last = np.flatnonzero(passes(tail, bound))
        where = np.concatenate([where, last + rows * group])
        magnitude = np.concatenate([magnitude, tail[last]])
    return where, magnitude


def group_maxima(u: Tensor, group: int) -> Tensor:
    """max |u| of every `group` consecutive entries; the last group may be shorter."""
    out = torch.empty(-(-u.numel() // group), dtype=u.dtype)
    step = BLOCK // group * group
    scratch = torch.empty(min(step, u.numel()), dtype=u.dtype)
    for start in range(0, u.numel(), step):
        part = torch.abs(u[start : start + step], out=scratch[: u[start : start + step].numel()])
        rows, first = part.numel() // group, start // group
        if rows:
            body = part[: rows * group].view(rows, group)
            torch.amax(body, dim=1, out=out[first : first + rows])
        if part.numel() > rows * group:
            out[first + rows] = part[rows * group :].amax()
    return out


def exact(where: np.ndarray, magnitude: np.ndarray, k: int) -> Tensor:
    """The k largest of the candidates; `where` is ascending, and so is the result."""
    bound = kth_largest(magnitude, k)
    chosen = magnitude > bound
    missing = k - np.count_nonzero(chosen)
    chosen[np.flatnonzero(magnitude == bound)[:missing]] = True
    out = where[chosen].astype(np.int32)
    assert out.size == k, f"{out.size} of {k} entries: u or its maxima are not finite"
    return torch.from_numpy(out)


def padded(u: Tensor, chosen: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """int32 indices and values of the chosen entries, with (size, 0) behind them; their count."""
    indices = torch.full((capacity,), u.numel(), dtype=torch.int32)
    values = torch.zeros(capacity, dtype=u.dtype)
    indices[: chosen.numel()] = chosen
    values[: chosen.numel()] = u[chosen]
    return indices, values, torch.tensor(chosen.numel(), dtype=torch.int32)


def kth_largest(x: np.ndarray, k: int) -> float:
    """numpy's introselect is twice as fast here as torch.topk."""
    return float(np.partition(x, x.size - k)[x.size - k])
