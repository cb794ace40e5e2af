"""topk, above and quantile on CUDA: how the launches of `phases_triton` are put together."""

import torch
from torch import Tensor

from gradwire.kernels.dispatch import constant
from gradwire.kernels.last_selection import Edge
from gradwire.kernels.select import group_size
from gradwire.kernels.triton.launch import Launcher
from gradwire.kernels.triton.scan import group_maxima
from gradwire.kernels.triton.select.phases import find_bound, prune_parts, winners
from gradwire.kernels.triton.select.sizes import PRUNE_WARPS, WARPS, plan, processors
from gradwire.kernels.triton.workspace import workspace

_launch_bound = Launcher(find_bound, num_warps=8)
# With more registers not all of its programs would run at once.
_launch_prune = Launcher(prune_parts, num_warps=PRUNE_WARPS, maxnreg=64)
_launch_topk = {warps: Launcher(winners, num_warps=warps) for warps in (WARPS, 2 * WARPS)}


def topk_triton(
    u: Tensor, k: int, maxima: Tensor | None = None, group: int = 0, edge: Edge | None = None
) -> tuple[Tensor, Tensor]:
    """Indices (see `topk`) and values. Moves 4 / group bytes an entry and 4 group + 24 a winner."""
    indices = torch.empty(k, dtype=torch.int32, device=u.device)
    values = torch.empty(k, dtype=u.dtype, device=u.device)
    if k:
        _select(u, k, maxima, group, None, indices, values, None, edge)
    if k and edge is not None:
        edge.chose(indices, values)
    return indices, values


def above_triton(
    u: Tensor, threshold: Tensor, capacity: int, maxima: Tensor | None = None, group: int = 0,
    edge: Edge | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `above`. The same launches; the threshold is the bound where it is the higher one."""
    return _above(u, threshold, capacity, maxima, group, edge)


def quantile_triton(
    u: Tensor, scale: float, k: int, maxima: Tensor, group: int, edge: Edge
) -> tuple[Tensor, Tensor, Tensor]:
    """See `quantile`. The same launches; the threshold is found where the bound is."""
    zero = constant(0, u.device).view(torch.float32)
    return _above(u, zero, k, maxima, group, edge, scale)


def _above(
    u: Tensor, threshold: Tensor, capacity: int, maxima: Tensor | None, group: int,
    edge: Edge | None, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    room = min(capacity, u.numel())
    indices = torch.empty(capacity, dtype=torch.int32, device=u.device)
    values = torch.empty(capacity, dtype=u.dtype, device=u.device)
    count = torch.empty((), dtype=torch.int32, device=u.device)
    if room < capacity:
        indices[room:].fill_(u.numel())
        values[room:].zero_()
    if room:
        _select(u, room, maxima, group, threshold, indices, values, count, edge, scale)
        if edge is not None:
            edge.chose(indices, values)
    else:
        count.zero_()
    return indices, values, count


def _select(
    u: Tensor, k: int, maxima: Tensor | None, group: int, threshold: Tensor | None,
    indices: Tensor, values: Tensor, count: Tensor | None, edge: Edge | None,
    scale: float | None = None,
) -> None:  # fmt: skip
    device, size = u.device, u.numel()
    counts = None if edge is None or maxima is None else edge.counted()
    if maxima is None:
        group = group_size(size, k, device)
        maxima = group_maxima(u, group) if group else None
    ruling = u if maxima is None else maxima
    p = plan(size, k, group if maxima is not None else 1, processors(device))
    rank = p.rank if counts is None else p.counted
    work, room = workspace(p.words, device)
    # Slices may begin anywhere; everything else is an allocation of its own.
    at = 0 if threshold is None else threshold.data_ptr() % 16
    key = (
        p.shape, u.dtype, u.data_ptr() % 16, ruling.dtype, ruling.data_ptr() % 16, counts is None,
        edge is None, count is None, at, scale is None,
    )  # fmt: skip
    words = None if edge is None else edge.words
    if p.begin:
        if counts is None:
            _launch_bound(1, key, u, work, ruling, threshold, words, p.n, rank, p.crowd, p.sample)
        _launch_prune(
            p.items * p.lists, key, u, work, u, ruling, counts, room, threshold, scale, words, size,
            p.n, rank, p.loose, p.crowd, p.share, p.room, p.spill, p.items * p.lists, p.group,
            p.rows, p.threads, p.whole, p.copies,
        )  # fmt: skip
    _launch_topk[p.warps](
        p.items, key, u, work, u, ruling, counts, room, threshold, scale, indices, values, count,
        words, size, k, p.n, rank, p.loose, p.crowd, p.share, p.room, p.spill, p.wide, p.items,
        p.lists, p.looks, p.group, p.sample, p.rows, p.threads, p.whole, p.begin, p.copies,
    )  # fmt: skip
