"""The reference of halve: plain torch, any device, no host sync."""

import torch
from torch import Tensor

from gradwire.kernels.level_torch import just_below

HALVINGS = 14


def halve_torch(
    u: Tensor, step: int, indices: Tensor, values: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `halve`. The sorted list settles every comparison, so all tests are side by side."""
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
