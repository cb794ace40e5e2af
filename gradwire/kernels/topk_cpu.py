"""topk on the CPU: group maxima rule out nearly everything before anything is compared exactly.

The k-th largest group maximum t is never above the k-th largest magnitude (k groups hold an entry
of at least t), so a group whose maximum is below t cannot hold a winner.
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
    if maxima is None or maxima.numel() <= k:
        return _exact(torch.arange(u.numel()), u.abs(), k)
    bound = _kth_largest(maxima, k)
    where, magnitude = _candidates(u, (maxima >= bound).nonzero().view(-1), group, bound)
    return _exact(where, magnitude, k)


def _candidates(u: Tensor, groups: Tensor, group: int, bound: float) -> tuple[Tensor, Tensor]:
    """Where the entries of at least `bound` are in the named groups, ascending, and their size."""
    rows = u.numel() // group
    whole = groups[groups < rows]
    magnitude = u[: rows * group].view(rows, group).index_select(0, whole).abs_().view(-1)
    near = (magnitude >= bound).nonzero().view(-1)
    where = whole[near // group] * group + near % group
    magnitude = magnitude[near]
    if whole.numel() < groups.numel():
        tail = u[rows * group :].abs()
        last = (tail >= bound).nonzero().view(-1)
        where = torch.cat([where, last + rows * group])
        magnitude = torch.cat([magnitude, tail[last]])
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


def _exact(where: Tensor, magnitude: Tensor, k: int) -> Tensor:
    """The k largest of the candidates; `where` is ascending, and so is the result."""
    bound = _kth_largest(magnitude, k)
    above = magnitude > bound
    missing = k - int(above.sum())
    tied = (magnitude == bound).nonzero().view(-1)[:missing]
    above[tied] = True
    chosen = where[above].to(torch.int32)
    assert chosen.numel() == k, f"{chosen.numel()} of {k} entries: u or its maxima are not finite"
    return chosen


def _kth_largest(x: Tensor, k: int) -> float:
    """numpy's introselect is twice as fast here as torch.topk, but knows no bf16."""
    if x.dtype == torch.bfloat16:
        x = x.float()
    return float(np.partition(x.numpy(), x.numel() - k)[x.numel() - k])
