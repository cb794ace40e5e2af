"""fill_run: keep the entries of a list beyond a threshold, and a run of the others."""

import torch
from torch import Tensor

from gradwire.kernels.dispatch import versions


def fill_run(
    indices: Tensor, values: Tensor, threshold: Tensor, k: int, number: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return at most k entries of a list: int32 indices, values and count (0-d int32).

    Entries with |value| > threshold are kept. A run of the others, neighbours in the list, fills up
    to k. Any place at which it can begin is as likely as any other.
    indices, values: ascending, with padding (size, 0) at the end, at least min(k, size) of them.
    threshold: 0-d fp32. number: a random number, 0-d int64, at least 0.
    """
    return _fill_run_on(values.device)(indices, values, threshold, k, number, size)


def fill_run_torch(
    indices: Tensor, values: Tensor, threshold: Tensor, k: int, number: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `fill_run` with torch ops."""
    real = indices < size
    wide = torch.promote_types(values.dtype, torch.float32)
    sure = real & (values.abs().to(wide) > threshold)
    others = real & ~sure
    wanted = (k - sure.sum()).clamp(min=0)
    start = number % (others.sum() - wanted + 1).clamp(min=1)
    place = others.cumsum(0) - 1
    chosen = sure | (others & (place >= start) & (place < start + wanted))
    # One spare place takes the writes of entries that are not chosen.
    room = min(k, size)
    to = torch.where(chosen, chosen.cumsum(0) - 1, room).clamp(max=room)
    out = indices.new_full((room + 1,), size).scatter_(0, to, indices)[:room]
    kept = values.new_zeros(room + 1).scatter_(0, to, values)[:room]
    return out, kept, chosen.sum(dtype=torch.int32).clamp(max=room)


_fill_run_on = versions(fill_run_torch, triton="gradwire.kernels.triton.fill_run.fill_run_triton")
