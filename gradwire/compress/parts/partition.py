"""What the methods share in which every worker chooses in a part of its own.

Parts are disjoint, so what workers choose adds up to k instead of growing with their number
("gradient build-up"). They belong to the union exchange, in which everyone gives what it has
wherever the owner of a part chose. Parts are whole blocks of ALIGN entries.
"""

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.types import ALIGN, Memory, Scan, Sparse

ROOM = 2
"""A message has room for so many times an even share of k. A worker whose part has more sends the
largest; the threshold then falls until the others make up for it."""

FAR = 1.25
"""A count that misses k by this factor is far off: the threshold moves faster and faster."""
PACE = 0.005


def capacity_per_rank(k: int, size: int, ranks: int) -> int:
    """Return the entries that one rank's message has room for."""
    return min(size, ROOM * -(-k // ranks))


def turn(memory: Memory, device: torch.device) -> Tensor:
    """Which part is this worker's in this step, (rank + step) mod P; counts the step."""
    if "step" not in memory:
        memory["step"] = torch.zeros((), dtype=torch.int64, device=device)
    mine = (memory["step"] + memory.rank) % memory.ranks
    memory["step"].add_(1)
    return mine


def threshold(u: Tensor, k: int, memory: Memory, scan: Scan | None) -> Tensor:
    """memory["theta"]; the first is the k-th largest |u|, a real quantile."""
    if "theta" not in memory:
        maxima, block = (scan.maxima, scan.block) if scan is not None else (None, 0)
        largest = kernels.select(u, max(1, k), maxima, block)[1].float().abs().amin()
        # `above` leaves out what equals the threshold, and the k-th is to pass.
        memory["theta"] = torch.nextafter(largest, torch.zeros_like(largest))
    return memory["theta"]


def passing(u: Tensor, k: int, inside: Tensor | None, memory: Memory, scan: Scan | None) -> Sparse:
    """What passes the threshold in the blocks that are `inside` (bool; None is all of them)."""
    theta = threshold(u, k, memory, scan)
    maxima, block = (scan.maxima, scan.block) if scan is not None else (None, 0)
    if inside is not None:
        u = torch.where(inside[:, None], u.view(-1, ALIGN), 0).view(-1)
        if maxima is not None:
            maxima = torch.where(inside[:, None], maxima.view(inside.numel(), -1), 0).view(-1)
    room = capacity_per_rank(k, u.numel(), memory.ranks)
    indices, values, count = kernels.above(u, theta, room, maxima, block)
    # Zero cannot be scaled: after gradients of zeros the smallest that was chosen takes its place.
    smallest = torch.where(indices < u.numel(), values.float().abs(), torch.inf).amin()
    theta.copy_(torch.where((theta == 0) & (count > 0), smallest, theta))
    return Sparse(indices, values, count, u.numel())


def follow(memory: Memory, chosen: Tensor, k: int) -> None:
    """Scale theta after a step in which all workers together chose so many."""
    theta = memory["theta"]
    pace = memory.setdefault("pace", torch.full_like(theta, PACE))
    ratio = chosen.float() / k
    pace.copy_(next_pace(pace, ratio))
    # A tensor in every choice: of numbers alone the user's default dtype would come out.
    fine = torch.where(ratio > 1, torch.full_like(ratio, 1.00125), 0.99875)
    fine = torch.where(ratio > 1.1, 1.005, torch.where(ratio <= 1 / 1.1, 0.995, fine))
    theta.mul_(torch.where(is_far(ratio), pace.exp(), fine))


def is_far(ratio: Tensor) -> Tensor:
    """Whether the count misses k by more than FAR."""
    return (ratio > FAR) | (ratio < 1 / FAR)


def next_pace(pace: Tensor, ratio: Tensor) -> Tensor:
    """By how much to move ln(theta) while the count is far off: more each time, less at a turn.

    Only what all workers know goes in, so that their thresholds move together.
    """
    side = torch.where(ratio > 1, torch.ones_like(ratio), -1.0)
    same = pace * side > 0
    more = torch.where(same, torch.full_like(pace, 1.5), 0.25)
    size = pace.abs() * torch.where(is_far(ratio), more, 0)
    return side * size.clamp(PACE, 50 * PACE)


def between(agreed: Sparse, bounds: Tensor) -> Tensor:
    """How many of the entries that all agreed on are in [bounds[i], bounds[i + 1])."""
    return torch.searchsorted(agreed.indices, bounds.to(torch.int32)).diff()
