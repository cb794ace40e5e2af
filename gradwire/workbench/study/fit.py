"""The shape of a vector's entries: tails, and which of three distributions fits."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

DEGREES = (0.5, 0.7, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0, 15.0, 30.0)
SAMPLE = 200_000
TAIL = 0.01


@dataclass(frozen=True)
class Shape:
    """What was found. Log-likelihoods are nats an entry that is not zero, by the best parameters.

    `kurtosis` is 3 for a normal, 6 for a Laplace distribution. `tail` is Hill's index of the
    largest hundredth: P(|x| > t) falls like t^-tail. `degrees` are those of the t that fits best.
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
        """The likeliest of the three."""
        fits = {"normal": self.normal, "Laplace": self.laplace, "t": self.t}
        return max(fits, key=lambda name: fits[name])


def shape(x: Tensor) -> Shape:
    """The shape of a flat vector that is not all zeros, found on its device."""
    x = x.detach().double()
    rms = float(x.square().mean().sqrt())
    centred = x - x.mean()
    spread = centred.square().mean()
    body = x[x != 0]
    step = max(1, body.numel() // SAMPLE)
    sample = body[::step] / rms
    degrees, t = student(sample)
    return Shape(
        rms=rms,
        mean=float(x.mean()),
        zeros=1 - body.numel() / x.numel(),
        kurtosis=float(centred.pow(4).mean() / spread.square()),
        tail=hill(body),
        normal=normal(sample),
        laplace=laplace(sample),
        t=t,
        degrees=degrees,
    )


def hill(x: Tensor) -> float:
    """Hill's estimate of the tail index from the largest hundredth of |x|."""
    count = max(2, round(TAIL * x.numel()))
    top = x.abs().topk(min(count, x.numel())).values
    excess = float((top[:-1] / top[-1]).log().mean()) if top.numel() > 1 else 0.0
    return 1 / excess if excess > 0 else math.inf


def normal(x: Tensor) -> float:
    """The mean log-likelihood of the best normal distribution."""
    return -0.5 * (math.log(2 * math.pi * float(x.var(correction=0))) + 1)


def laplace(x: Tensor) -> float:
    """The mean log-likelihood of the best Laplace distribution."""
    return -math.log(2 * float((x - x.median()).abs().mean())) - 1


def student(x: Tensor, rounds: int = 30) -> tuple[float, float]:
    """The degrees of freedom of the best t around zero, and its mean log-likelihood.

    For each of DEGREES the scale is found by expectation maximisation.
    """
    squares, best = x.square(), (0.0, -math.inf)
    for nu in DEGREES:
        scale = squares.median().clamp(min=1e-12)
        for _ in range(rounds):
            scale = ((nu + 1) * squares / (nu + squares / scale)).mean()
        constant = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2)
        constant -= 0.5 * math.log(nu * math.pi * float(scale))
        found = constant - (nu + 1) / 2 * float(torch.log1p(squares / scale / nu).mean())
        best = max(best, (nu, found), key=lambda pair: pair[1])
    return best
