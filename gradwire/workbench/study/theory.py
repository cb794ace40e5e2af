"""How much of u a selection leaves behind: closed forms, bounds, and what they say of training.

p = k/d; the error of a selection C is ||u - C(u)||^2 / ||u||^2.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import torch
from torch import Tensor

NORMAL = NormalDist()


def random_error(p: float) -> float:
    """Of k random entries, in the mean: 1 - p. An upper bound for top-k on any u."""
    return 1 - p


def paper_bound(p: float) -> float:
    """(1 - p)^2, the bound on top-k of Shi et al. (2019), Theorem 1; `bound_holds` says when."""
    return (1 - p) ** 2


def gaussian_error(p: float) -> float:
    """Of top-k on independent normal entries: 1 - p - 2 z phi(z), z = Phi^-1(1 - p/2).

    What is kept is 2 int_z^inf x^2 phi(x) dx = 2 z phi(z) + p.
    """
    z = NORMAL.inv_cdf(1 - p / 2)
    return 1 - p - 2 * z * NORMAL.pdf(z)


def laplace_error(p: float) -> float:
    """Of top-k on independent Laplace entries: 1 - p (1 + L + L^2/2), L = ln(1/p)."""
    log = math.log(1 / p)
    return 1 - p * (1 + log + log * log / 2)


def iterations(error: float) -> float:
    """1 / delta^2, delta = 1 - error: the steps after which Theorem 2's rate is that of dense SGD.

    Up to a constant. 1 - p gives c^2 and (1 - p)^2 gives c^4 / (2c - 1)^2, for c = 1/p.
    """
    return 1 / (1 - error) ** 2


def topk_errors(u: Tensor, ks: Sequence[int]) -> list[float]:
    """The exact error of top-k on u for each k."""
    squares = u.double().square().sort(descending=True).values
    kept = squares.cumsum(0)
    total = float(kept[-1])
    return [1 - float(kept[k - 1]) / total for k in ks]


def bound_holds(u: Tensor, k: int) -> bool:
    """Whether the error of top-k on u is at most (1 - p)^2.

    That is: the mean square of the k largest is at least (2 - p) times that of all. It is so for
    every even, unimodal density around zero; more precisely wherever g(x)/x falls, g the density
    of |x|.
    """
    squares = u.double().square()
    largest = squares.topk(k, sorted=False).values.mean()
    return bool(largest >= (2 - k / u.numel()) * squares.mean())


def profile(u: Tensor, points: int) -> tuple[list[float], list[float]]:
    """Figure 3(b): i/d, and the i-th largest square over the largest, at `points` places."""
    squares = u.double().square().sort(descending=True).values
    at = places(u.numel(), points)
    return (at.double() / (u.numel() - 1)).tolist(), (squares[at] / squares[0]).tolist()


def places(size: int, points: int) -> Tensor:
    """`points` of the entries 0 to size - 1, evenly spread, both ends among them."""
    # In fp32 the last of 66,034,000 is one beyond the end.
    return torch.linspace(0, size - 1, points, dtype=torch.float64).round().long()
