"""Gaussian_k: a threshold from the quantile of a normal distribution, corrected by counting."""

import functools
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compress.gaussiank_published import TESTS, published
from gradwire.compress.method import Method
from gradwire.compress.thresholds import (
    SAMPLE_SIZE,
    normal_quantile,
    prime_stride,
    search_ladder,
    select_beyond,
)
from gradwire.errors import ConfigError, unknown
from gradwire.kernels.find_by_counts import Aim
from gradwire.types import Memory, Scan, Sparse

LEAST, MOST = Fraction(2, 3), Fraction(4, 3)
"""A threshold is accepted if LEAST times k to MOST times k entries pass."""
_VARIANTS = ("repaired", *TESTS)
_LADDER = (4, 2, 1, 0.5, 0.25, 0, -0.25, -0.5, -0.75, -1, -1.5, -2, -3, -4, -8, -16, -32, -64, -126)
"""Powers of two by which the threshold of the fit is multiplied, the highest first."""


def gaussiank(
    u: Tensor,
    k: int,
    memory: Memory,
    scan: Scan | None = None,
    *,
    variant: str = "repaired",
    exact: bool = False,
) -> Sparse:
    """The entries beyond a Gaussian quantile that counting corrects: 2/3 k to 4/3 k on any data.

    Gaussian_k of Shi et al. (2019, arXiv 1911.08772), in three variants:
    - paper: Algorithm 1 to the letter. t = mean + z std, with z = Phi^-1(1 - k/d). At most four
      times (i = 0..3) n = count(|u| > t) is tested. If n < 2k/3, t /= 2; if n > 4k/3, t *= 1.5;
      otherwise the tests stop. The entries of the last test are sent, and the last change of t is
      not used. On N(0,1) at density 0.001 the tests count 2.03, 0.004, 20.5 and 0.53 times k.
    - released: as in the authors' code. z = Phi^-1(1 - k/2d), and there are three tests.
    - repaired: t = z sqrt(mean u^2), with z = Phi^-1(1 - k/2d). It is accepted if 2k/3 to 4k/3
      entries pass, as in the paper. Otherwise the entries above multiples of t are counted. The
      range between two that are too low and too high is cut in eight, until a threshold is
      accepted. That takes one or two passes on usual data, and at most fifteen on any.

    repaired sends what passes. Only equal entries can leave no such threshold. Then 4k/3 of the
    entries that pass the next lower one are sent, and the others wait in the residual. The mean is
    the mean of a sample.
    paper and released send 0 to 330 k. Every rank's message has room for the most that any
    rank found. For this the ranks exchange their counts, and the host waits once per bundle:
    `stats().length_exchanges`. No CUDA graph can capture that.
    exact (repaired): True: the k largest are sent, of a threshold that at least k pass. This is
    top-k.
    """
    if variant != "repaired":
        return published(u, k, memory, scan, variant)
    room = gaussiank_capacity(k, u.numel(), {"variant": variant, "exact": exact})
    if k == 0:
        return select_beyond(u, u.new_zeros(()), 0, scan)
    step = prime_stride(u.numel(), SAMPLE_SIZE)
    z = normal_quantile(1 - k / memory.real_size(u) / 2)
    start = torch.zeros((), dtype=torch.float32, device=u.device)
    # In one launch on CUDA: `start` becomes z times the root mean square.
    kernels.first_threshold(start, u, step, z / (-(-u.numel() // step)) ** 0.5)
    least, most = k if exact else math.ceil(LEAST * k), math.floor(MOST * k)
    tests = torch.cat([start * _multiples(u.device), start.new_zeros(1)])
    return select_beyond(
        u, search_ladder(u, scan, tests, Aim(least, most, least, most)), room, scan
    )


@functools.lru_cache(maxsize=16)
def _multiples(device: torch.device) -> Tensor:
    """Return the factors on the threshold of the fit, descending to 0."""
    factors = [*(2.0**power for power in _LADDER), 0.0]
    return torch.tensor(factors, dtype=torch.float32, device=device)


def gaussiank_capacity(k: int, size: int, options: Mapping[str, Any]) -> int:
    """Return the most entries that pass uncut; for the published variants the number aimed at."""
    if options["exact"] or options["variant"] != "repaired":
        return k
    return min(size, math.floor(MOST * k))


def check_gaussiank(options: Mapping[str, Any], user_options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an unknown variant, or an option that has no effect."""
    variant = options["variant"]
    if variant not in _VARIANTS:
        raise unknown("variant of gaussiank", variant, _VARIANTS)
    if variant != "repaired" and options["exact"]:
        raise ConfigError(
            f"gaussiank's variant {variant!r} sends what passes, as published: exact=True is for "
            "variant='repaired'"
        )


METHOD = Method(
    gaussiank,
    capacity=gaussiank_capacity,
    maxima16=True,
    check=check_gaussiank,
    varies=lambda options: options["variant"] != "repaired",
)
