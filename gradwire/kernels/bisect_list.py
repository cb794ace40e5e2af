"""halve: of the 2k largest entries, those beyond a threshold found by halving a range."""

import torch
from torch import Tensor

from gradwire.kernels.dispatch import versions
from gradwire.kernels.last_selection import LastSelection
from gradwire.kernels.threshold import just_below

HALVINGS = 14


def bisect_list(
    u: Tensor,
    step: int,
    indices: Tensor,
    values: Tensor,
    k: int,
    last_selection: LastSelection | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """int32 indices, values and count (0-d int32) of the listed entries that pass, at least k/2.

    The threshold is the first of 14 halvings of the range from mean |u|, over every `step`-th
    entry, to max |u| that between k and 2k entries pass, neither included; else the last of them,
    or where k/2 do not pass that, what they do. Ascending, padded to the length of the list with
    (size, 0). indices, values: the 2k largest of u, or all, as `select` gives them; k is at
    least 1.
    last_selection (CUDA): has been told where these end, and is told where those that pass do.
    """
    if last_selection is None:
        return _bisect_list_on(u.device)(u, step, indices, values, k)
    return _bisect_list_on(u.device)(u, step, indices, values, k, last_selection)


def bisect_list_torch(
    u: Tensor, step: int, indices: Tensor, values: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `bisect_list`. The sorted list settles every comparison: all tests are side by side."""
    wide = torch.promote_types(u.dtype, torch.float32)
    magnitude = values.abs().to(wide)
    found = magnitude.float().sort(descending=True).values
    mean, top, half = u[::step].abs().to(wide).mean().float(), found[0], found[-(-k // 2) - 1]
    more, twice = (_rank(found, r) for r in (k + 1, 2 * k))
    tests = torch.lerp(mean, top, path((half - mean) / (top - mean), HALVINGS))
    stops = (tests < more) & (tests >= twice)
    stops[-1:].fill_(True)
    last = tests.take(stops.to(torch.uint8).argmax())
    # Where half of k entries lie above no threshold of the path: ties, or fewer that are not zero.
    keep = magnitude > torch.fmin(last, just_below(half))
    room = indices.numel()
    # One more place than there is room for takes what does not pass.
    place = torch.where(keep, keep.cumsum(0) - 1, room)
    where = indices.new_full((room + 1,), u.numel()).scatter_(0, place, indices)[:room]
    passed = values.new_zeros(room + 1).scatter_(0, place, values)[:room]
    return where, passed, keep.sum(dtype=torch.int32)


def _rank(tail: Tensor, r: int) -> Tensor:
    """The r-th largest magnitude, 0 behind the end: n >= r where t is less."""
    return tail[r - 1] if r <= tail.numel() else tail.new_zeros(())


def path(goal: Tensor, halvings: int) -> Tensor:
    """The ratios that a search for `goal` in [0, 1] tests: each interval's middle."""
    parts = torch.arange(halvings, dtype=goal.dtype, device=goal.device).exp2_()
    return (torch.ceil(goal.clamp(0, 1) * parts) - 0.5).clamp(min=0.5) / parts


_bisect_list_on = versions(
    bisect_list_torch, triton="gradwire.kernels.triton.bisect_list.bisect_list_triton"
)
