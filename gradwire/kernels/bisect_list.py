"""bisect_list: cut a list of the 2k largest entries by a threshold found by bisection."""

import torch
from torch import Tensor

from gradwire.kernels.dispatch import versions
from gradwire.kernels.last_selection import LastSelection
from gradwire.kernels.threshold import just_below

HALVINGS = 14
"""Thresholds that the bisection tests at most."""


def bisect_list(
    u: Tensor,
    step: int,
    indices: Tensor,
    values: Tensor,
    k: int,
    last_selection: LastSelection | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the listed entries above a bisected threshold, at least k/2, ascending by index.

    Return int32 indices, values and count (0-d int32), padded to the length of the list with (size,
    0). The bisection tests 14 thresholds between mean |u|, over every `step`-th entry, and max |u|.
    It stops at the first that more than k and fewer than 2k entries pass. If none stops it, the
    last one counts. A threshold that fewer than k/2 entries pass is lowered until k/2 pass.
    indices, values: the 2k largest of u, or all of u, as `select` returns them. k is at least 1.
    last_selection (CUDA): the notes of the selection that made the list. They are updated to the
    entries that pass.
    """
    if last_selection is None:
        return _bisect_list_on(u.device)(u, step, indices, values, k)
    return _bisect_list_on(u.device)(u, step, indices, values, k, last_selection)


def bisect_list_torch(
    u: Tensor, step: int, indices: Tensor, values: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `bisect_list` with torch ops.

    The list, sorted by magnitude, answers every comparison, so all tests are done side by side.
    """
    wide = torch.promote_types(u.dtype, torch.float32)
    magnitude = values.abs().to(wide)
    sorted_list = magnitude.float().sort(descending=True).values
    mean = u[::step].abs().to(wide).mean().float()
    top, half = sorted_list[0], sorted_list[-(-k // 2) - 1]
    more, twice = (_rank(sorted_list, r) for r in (k + 1, 2 * k))
    tests = torch.lerp(mean, top, bisection_path((half - mean) / (top - mean), HALVINGS))
    stops = (tests < more) & (tests >= twice)
    stops[-1:].fill_(True)
    last = tests.take(stops.to(torch.uint8).argmax())
    # Ties, or few entries that are not zero, may leave fewer than k/2 above every tested threshold.
    keep = magnitude > torch.fmin(last, just_below(half))
    room = indices.numel()
    # One spare place takes the writes of entries that do not pass.
    place = torch.where(keep, keep.cumsum(0) - 1, room)
    chosen = indices.new_full((room + 1,), u.numel()).scatter_(0, place, indices)[:room]
    passed = values.new_zeros(room + 1).scatter_(0, place, values)[:room]
    return chosen, passed, keep.sum(dtype=torch.int32)


def _rank(descending: Tensor, rank: int) -> Tensor:
    """Return the rank-th largest magnitude of a descending list, 0 behind its end.

    At least `rank` magnitudes exceed any t below the result.
    """
    return descending[rank - 1] if rank <= descending.numel() else descending.new_zeros(())


def bisection_path(goal: Tensor, halvings: int) -> Tensor:
    """Return the ratios that a bisection for `goal` in [0, 1] tests: the interval middles."""
    parts = torch.arange(halvings, dtype=goal.dtype, device=goal.device).exp2_()
    return (torch.ceil(goal.clamp(0, 1) * parts) - 0.5).clamp(min=0.5) / parts


_bisect_list_on = versions(
    bisect_list_torch, triton="gradwire.kernels.triton.bisect_list.bisect_list_triton"
)
