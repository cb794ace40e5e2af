"""topk and above on CUDA: the launches of `phases`, and their arguments."""

import torch
from torch import Tensor

from gradwire.kernels.last_selection import LastSelection
from gradwire.kernels.select import block_size
from gradwire.kernels.triton.launch import Launcher
from gradwire.kernels.triton.scan import block_maxima
from gradwire.kernels.triton.select.phases import prune_parts, store_bound, winners
from gradwire.kernels.triton.select.sizes import PRUNE_WARPS, WARPS, launch_sizes, processors
from gradwire.kernels.triton.workspace import workspace

_launch_bound = Launcher(store_bound, "work record", num_warps=8)
# With more registers per thread, not all programs would run at once.
_launch_prune = Launcher(
    prune_parts, "work counts scratch record", num_warps=PRUNE_WARPS, maxnreg=64
)
_launch_topk = {
    warps: Launcher(winners, "work counts scratch_at indices values count record", num_warps=warps)
    for warps in (WARPS, 2 * WARPS)
}


def topk_triton(
    u: Tensor,
    k: int,
    maxima: Tensor | None = None,
    block: int = 0,
    last_selection: LastSelection | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the indices of `topk`, and the values.

    Moves 4 / block bytes per entry, and 4 block + 24 per winner.
    """
    indices = torch.empty(k, dtype=torch.int32, device=u.device)
    values = torch.empty(k, dtype=u.dtype, device=u.device)
    if k:
        _select(u, k, maxima, block, None, indices, values, None, last_selection)
    if k and last_selection is not None:
        last_selection.remember(indices, values)
    return indices, values


def above_triton(
    u: Tensor, threshold: Tensor, capacity: int, maxima: Tensor | None = None, block: int = 0,
    last_selection: LastSelection | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute `above` by the launches of `topk`.

    The bound is the higher one of the threshold and the bound of the k largest.
    """
    room = min(capacity, u.numel())
    indices = torch.empty(capacity, dtype=torch.int32, device=u.device)
    values = torch.empty(capacity, dtype=u.dtype, device=u.device)
    count = torch.empty((), dtype=torch.int32, device=u.device)
    if room < capacity:
        indices[room:].fill_(u.numel())
        values[room:].zero_()
    if room:
        _select(u, room, maxima, block, threshold, indices, values, count, last_selection)
        if last_selection is not None:
            last_selection.remember(indices, values)
    else:
        count.zero_()
    return indices, values, count


def _select(
    u: Tensor, k: int, maxima: Tensor | None, block: int, threshold: Tensor | None,
    indices: Tensor, values: Tensor, count: Tensor | None, last_selection: LastSelection | None,
) -> None:  # fmt: skip
    device, size = u.device, u.numel()
    counts = None if last_selection is None or maxima is None else last_selection.take_counts()
    if maxima is None:
        block = block_size(size, k, device)
        maxima = block_maxima(u, block) if block else None
    # The vector that the bound is taken from.
    ruling = u if maxima is None else maxima
    p = launch_sizes(size, k, block if maxima is not None else 1, processors(device))
    rank = p.rank if counts is None else p.counted
    work, scratch = workspace(p.words, device)
    record = None if last_selection is None else last_selection.record
    if p.begin:
        if counts is None:
            _launch_bound(1, u, work, ruling, threshold, record, p.n, rank, p.crowd, p.sample)
        _launch_prune(
            p.items * p.lists, u, work, u, ruling, counts, scratch, threshold, record, size,
            p.n, rank, p.crowd, p.share, p.room, p.spill, p.items * p.lists, p.block,
            p.rows, p.threads, p.whole, p.copies,
        )  # fmt: skip
    _launch_topk[p.warps](
        p.items, u, work, u, ruling, counts, scratch, threshold, indices, values, count,
        record, size, k, p.n, rank, p.crowd, p.share, p.room, p.spill, p.wide, p.items,
        p.lists, p.looks, p.block, p.sample, p.rows, p.threads, p.whole, p.begin, p.copies,
    )  # fmt: skip
