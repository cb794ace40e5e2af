"""Fit three distributions to the entries of a vector, and measure its tails."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Degrees of freedom of Student's t that are tried.
DEGREES = (0.5, 0.7, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0, 15.0, 30.0)
SAMPLE = 200_000
"""Entries that the distributions are fitted to."""
TAIL = 0.01
"""Share of the largest entries that the tail index is estimated from."""


@dataclass(frozen=True)
class Shape:
    """The shape of a vector.

    kurtosis: 3 for a normal, 6 for a Laplace distribution.
    tail: Hill's index of the largest hundredth; P(|x| > t) falls like t^-tail.
    normal, laplace, t: log-likelihoods of the best fits, in nats per entry that is not zero.
    degrees: the degrees of freedom of the best t.
    """

    rms: float
    mean: float
    zeros: float
    kurtosis: float
    tail: float
    normal: float
    laplace: float
    t: float
    degrees: float

    @property
    def best(self) -> str:
        """The name of the likeliest distribution."""
        fits = {"normal": self.normal, "Laplace": self.laplace, "t": self.t}
        return max(fits, key=lambda name: fits[name])


def fit_shape(x: Tensor) -> Shape:
    """Return the shape of a flat vector that is not all zeros; compute on its device."""
    x = x.detach().double()
    rms = float(x.square().mean().sqrt())
    centred = x - x.mean()
    spread = centred.square().mean()
    nonzero = x[x != 0]
    step = max(1, nonzero.numel() // SAMPLE)
    sample = nonzero[::step] / rms
    degrees, t = _fit_student_t(sample)
    return Shape(
        rms=rms,
        mean=float(x.mean()),
        zeros=1 - nonzero.numel() / x.numel(),
        kurtosis=float(centred.pow(4).mean() / spread.square()),
        tail=tail_index(nonzero),
        normal=_normal_likelihood(sample),
        laplace=_laplace_likelihood(sample),
        t=t,
        degrees=degrees,
    )


def tail_index(x: Tensor) -> float:
    """Return Hill's estimate of the tail index from the largest hundredth of |x|."""
    count = max(2, round(TAIL * x.numel()))
    top = x.abs().topk(min(count, x.numel())).values
    excess = float((top[:-1] / top[-1]).log().mean()) if top.numel() > 1 else 0.0
    return 1 / excess if excess > 0 else math.inf


def _normal_likelihood(x: Tensor) -> float:
    """Return the mean log-likelihood of the best normal distribution."""
    return -0.5 * (math.log(2 * math.pi * float(x.var(correction=0))) + 1)


def _laplace_likelihood(x: Tensor) -> float:
    """Return the mean log-likelihood of the best Laplace distribution."""
    return -math.log(2 * float((x - x.median()).abs().mean())) - 1


def _fit_student_t(x: Tensor, rounds: int = 30) -> tuple[float, float]:
    """Return the degrees of freedom of the best t around zero, and its mean log-likelihood.

    Expectation maximisation finds the scale for each of DEGREES.
    """
    squares, best = x.square(), (0.0, -math.inf)
    for nu in DEGREES:
        scale = squares.median().clamp(min=1e-12)
        for _ in range(rounds):
            scale = ((nu + 1) * squares / (nu + squares / scale)).mean()
        constant = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2)
        constant -= 0.5 * math.log(nu * math.pi * float(scale))
        likelihood = constant - (nu + 1) / 2 * float(torch.log1p(squares / scale / nu).mean())
        best = max(best, (nu, likelihood), key=lambda pair: pair[1])
    return best
