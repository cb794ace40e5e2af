"""Parts of u: every worker chooses entries in a part that no other worker has.

Parts are disjoint, so the choices of the workers add up to k instead of growing with their number
("gradient build-up"). Such methods need the union exchange. In it every worker gives its values at
all entries that the owner of a part chose. Parts are whole blocks of ALIGN entries.
"""

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.types import ALIGN, Memory, Scan, Sparse

_ROOM = 2
"""The room in a message, over an even share of k.

A worker with more entries in its part sends the largest. The threshold then falls until the other
workers make up for the cut.
"""

_FAR = 1.25
"""The factor by which a count misses k to be far off. The threshold then speeds up."""
_PACE = 0.005
"""The smallest change of ln(theta) while the count is far off; the largest is 50 times as large."""


def capacity_per_rank(k: int, size: int, ranks: int) -> int:
    """Return the entries that one rank's message has room for."""
    return min(size, _ROOM * -(-k // ranks))


def next_part(memory: Memory, device: torch.device) -> Tensor:
    """Return this worker's part in this step, (rank + step) mod P (0-d), and count the step."""
    if "step" not in memory:
        memory["step"] = torch.zeros((), dtype=torch.int64, device=device)
    part = (memory["step"] + memory.rank) % memory.ranks
    memory["step"].add_(1)
    return part


def _shared_threshold(u: Tensor, k: int, memory: Memory, scan: Scan | None) -> Tensor:
    """Return memory["theta"]; at first the k-th largest |u|, which is a real quantile."""
    if "theta" not in memory:
        maxima, block = (scan.maxima, scan.block) if scan is not None else (None, 0)
        largest = kernels.select(u, max(1, k), maxima, block)[1].float().abs().amin()
        # `above` leaves out entries that equal the threshold, and the k-th largest must pass.
        memory["theta"] = torch.nextafter(largest, torch.zeros_like(largest))
    return memory["theta"]


def select_in_part(
    u: Tensor, k: int, inside: Tensor | None, memory: Memory, scan: Scan | None
) -> Sparse:
    """Return the entries beyond the threshold in the rows of ALIGN entries that are `inside`.

    inside: bool, one per row; None for all rows.
    """
    theta = _shared_threshold(u, k, memory, scan)
    maxima, block = (scan.maxima, scan.block) if scan is not None else (None, 0)
    if inside is not None:
        u = torch.where(inside[:, None], u.view(-1, ALIGN), 0).view(-1)
        if maxima is not None:
            maxima = torch.where(inside[:, None], maxima.view(inside.numel(), -1), 0).view(-1)
    capacity = capacity_per_rank(k, u.numel(), memory.ranks)
    indices, values, count = kernels.above(u, theta, capacity, maxima, block)
    # A theta of zero, after gradients of zeros, cannot be scaled: the smallest chosen value
    # replaces it.
    smallest = torch.where(indices < u.numel(), values.float().abs(), torch.inf).amin()
    theta.copy_(torch.where((theta == 0) & (count > 0), smallest, theta))
    return Sparse(indices, values, count, u.numel())


def adapt_threshold(memory: Memory, chosen: Tensor, k: int) -> None:
    """Scale theta by the number of entries that all workers chose together."""
    theta = memory["theta"]
    pace = memory.setdefault("pace", torch.full_like(theta, _PACE))
    ratio = chosen.float() / k
    pace.copy_(_next_pace(pace, ratio))
    # One tensor in every torch.where, because two numbers would take the user's default dtype.
    fine = torch.where(ratio > 1, torch.full_like(ratio, 1.00125), 0.99875)
    fine = torch.where(ratio > 1.1, 1.005, torch.where(ratio <= 1 / 1.1, 0.995, fine))
    theta.mul_(torch.where(_is_far(ratio), pace.exp(), fine))


def _is_far(ratio: Tensor) -> Tensor:
    """Return True where the count misses k by more than _FAR."""
    return (ratio > _FAR) | (ratio < 1 / _FAR)


def _next_pace(pace: Tensor, ratio: Tensor) -> Tensor:
    """Return the change of ln(theta) while the count is far off: more each time, less at a turn.

    Only numbers that all workers know go in, so that their thresholds move together.
    """
    side = torch.where(ratio > 1, torch.ones_like(ratio), -1.0)
    same_direction = pace * side > 0
    growth = torch.where(same_direction, torch.full_like(pace, 1.5), 0.25)
    size = pace.abs() * torch.where(_is_far(ratio), growth, 0)
    return side * size.clamp(_PACE, 50 * _PACE)


def count_between(agreed: Sparse, bounds: Tensor) -> Tensor:
    """Return the numbers of agreed entries in [bounds[i], bounds[i + 1])."""
    return torch.searchsorted(agreed.indices, bounds.to(torch.int32)).diff()
