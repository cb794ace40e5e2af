"""Compute the share of u's energy that a selection leaves behind.

Closed forms, bounds, and their consequence for training. p = k/d. The error of a selection C is
||u - C(u)||^2 / ||u||^2.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import torch
from torch import Tensor

NORMAL = NormalDist()


def random_error(p: float) -> float:
    """Return the mean error of k random entries: 1 - p. It bounds the error of top-k on any u."""
    return 1 - p


def paper_bound(p: float) -> float:
    """Return (1 - p)^2, the bound on top-k by Theorem 1 of Shi et al. (2019).

    `bound_holds` tests the condition for it.
    """
    return (1 - p) ** 2


def gaussian_error(p: float) -> float:
    """Return the error of top-k on independent normal entries.

    It is 1 - p - 2 z phi(z) with z = Phi^-1(1 - p/2). The energy kept is
    2 int_z^inf x^2 phi(x) dx = 2 z phi(z) + p.
    """
    z = NORMAL.inv_cdf(1 - p / 2)
    return 1 - p - 2 * z * NORMAL.pdf(z)


def laplace_error(p: float) -> float:
    """Return the error of top-k on independent Laplace entries.

    It is 1 - p (1 + L + L^2/2) with L = ln(1/p).
    """
    log = math.log(1 / p)
    return 1 - p * (1 + log + log * log / 2)


def iterations(error: float) -> float:
    """Return 1 / delta^2 with delta = 1 - error.

    Up to a constant, Theorem 2 reaches the rate of dense SGD after this number of steps. With
    c = 1/p, an error of 1 - p gives c^2, and (1 - p)^2 gives c^4 / (2c - 1)^2.
    """
    return 1 / (1 - error) ** 2


def topk_errors(u: Tensor, ks: Sequence[int]) -> list[float]:
    """Return the exact error of top-k on u for each k."""
    squares = u.double().square().sort(descending=True).values
    kept = squares.cumsum(0)
    total = float(kept[-1])
    return [1 - float(kept[k - 1]) / total for k in ks]


def bound_holds(u: Tensor, k: int) -> bool:
    """Return True if the error of top-k on u is at most (1 - p)^2.

    The equivalent condition: the mean square of the k largest entries is at least (2 - p) times the
    mean square of all entries. It holds for every even, unimodal density around zero. More
    precisely, it holds wherever g(x)/x falls, with g the density of |x|.
    """
    squares = u.double().square()
    largest = squares.topk(k, sorted=False).values.mean()
    return bool(largest >= (2 - k / u.numel()) * squares.mean())


def rank_profile(u: Tensor, points: int) -> tuple[list[float], list[float]]:
    """Return i/d and the i-th largest square over the largest, at `points` ranks i: Figure 3(b)."""
    squares = u.double().square().sort(descending=True).values
    ranks = spread_indices(u.numel(), points)
    return (ranks.double() / (u.numel() - 1)).tolist(), (squares[ranks] / squares[0]).tolist()


def spread_indices(size: int, points: int) -> Tensor:
    """Return `points` evenly spread indices from 0 to size - 1, both ends included."""
    # In fp32 the last index for a size of 66,034,000 would be beyond the end.
    return torch.linspace(0, size - 1, points, dtype=torch.float64).round().long()
