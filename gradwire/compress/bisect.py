"""Threshold binary search: halve the range between mean and maximum until k < n < 2k."""

import torch
from torch import Tensor

from gradwire.compress.estimate import SEEN, beyond, rank, room, sample, tail
from gradwire.kernels.level_torch import just_below
from gradwire.types import Memory, Scan, Sparse

HALVINGS = 14
MOST = 2.0


def bisect(u: Tensor, k: int, memory: Memory, scan: Scan | None = None) -> Sparse:
    """A threshold by halving the range between mean |u| and max |u| until k < n < 2k.

    Threshold binary search of RedSync (Fang et al. 2018): t = mean + ratio (max - mean), ratio =
    (l + r) / 2 in [0, 1]; stop where k < n < 2k; n < k/2 lowers r, anything else raises l; until
    r - l < 2^-14 (copies stop at 0.2, after three tests: 0.27 k on a Gaussian, 0.001 k on t3).
    The last test is what is sent: k/2 <= n < 2k; where ties leave no such n, the largest 2k. The
    mean is that of a sample; n comes from the sorted 2k largest, which settle every comparison, so
    all tests are done side by side.
    """
    found = tail(u, 2 * k, scan)
    mean, top = sample(u, SEEN).mean().float(), rank(found, 1)
    half, more, twice = rank(found, -(-k // 2)), rank(found, k + 1), rank(found, 2 * k)
    tests = torch.lerp(mean, top, path((half - mean) / (top - mean), HALVINGS))
    stops = (tests < more) & (tests >= twice)
    stops[-1:].fill_(True)
    last = tests.take(stops.to(torch.uint8).argmax())
    # Where half of k entries lie above no threshold of the path: ties, or fewer that are not zero.
    return beyond(u, torch.fmin(last, just_below(half)), room(k, u.numel(), MOST), scan)


def path(goal: Tensor, halvings: int) -> Tensor:
    """The ratios that a search for `goal` in [0, 1] tests: each interval's middle."""
    parts = torch.arange(halvings, dtype=goal.dtype, device=goal.device).exp2_()
    return (torch.ceil(goal.clamp(0, 1) * parts) - 0.5).clamp(min=0.5) / parts
