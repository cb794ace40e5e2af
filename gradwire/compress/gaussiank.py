"""Gaussian_k: a threshold from the quantile of a normal distribution."""

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compress.method import Method
from gradwire.compress.thresholds import (
    capacity_for,
    check_capacity,
    largest_magnitudes,
    select_beyond,
    threshold_by_rule,
)
from gradwire.errors import ConfigError, unknown
from gradwire.kernels.threshold import Rule
from gradwire.types import Memory, Scan, Sparse

TESTS = {"paper": 4, "released": 3}
"""The number of thresholds that a variant tests."""
_VARIANTS = ("repaired", *TESTS)


def gaussiank(
    u: Tensor,
    k: int,
    memory: Memory,
    scan: Scan | None = None,
    *,
    variant: str = "repaired",
    capacity: float = 4.0,
) -> Sparse:
    """A threshold from a Gaussian quantile; repaired, so that it finds k entries on any data.

    Gaussian_k of Shi et al. (2019, arXiv 1911.08772), in three variants:
    - paper: Algorithm 1 to the letter. t = mean + z std, with z = Phi^-1(1 - k/d). At most four
      times (i = 0..3) n = count(|u| > t) is tested. If n < 2k/3, t /= 2; if n > 4k/3, t *= 1.5;
      otherwise the tests stop. The entries of the last test are sent, and the last change of t is
      not used. On N(0,1) at density 0.001 the tests count 2.03, 0.004, 20.5 and 0.53 times k.
    - released: as in the authors' code. z = Phi^-1(1 - k/2d), and there are three tests.
    - repaired: t = z sqrt(mean u^2), with z = Phi^-1(1 - k/2d). t is held between two group maxima,
      which k and 1.25 k groups reach, so that n >= k. The k largest of these entries are taken: n =
      k, or all entries that are not zero. The mean is the mean of a sample. On CUDA, from the
      second step on, the scan computes the mean and the selection finds t.

    The first two variants select 0 to 20 times k. If more than `capacity` times k entries pass, the
    largest are taken and the others are kept.
    """
    if variant == "repaired":
        return _repaired(u, k, memory, scan)
    share = k / memory.real_size(u)
    p = 1 - share if variant == "paper" else 1 - share / 2
    start = _mean_and_deviations(u, memory.real_size(u), _quantile(p))
    tested = successive_thresholds(
        start, largest_magnitudes(u, 4 * k // 3 + 1, scan), k, TESTS[variant]
    )
    return select_beyond(u, tested[-1], capacity_for(k, u.numel(), capacity), scan)


def gaussiank_capacity(k: int, size: int, options: Mapping[str, Any]) -> int:
    """Return k, or the limit of the variants that do not find k entries."""
    return k if options["variant"] == "repaired" else capacity_for(k, size, options["capacity"])


def check_gaussiank(options: Mapping[str, Any], user_options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an unknown variant, or a capacity that has no effect."""
    variant = options["variant"]
    if variant not in _VARIANTS:
        raise unknown("variant of gaussiank", variant, _VARIANTS)
    if variant == "repaired" and "capacity" in user_options:
        raise ConfigError(
            "capacity has no effect on gaussiank's variant 'repaired', which finds k entries: "
            "leave it out, or use variant='paper' or 'released'"
        )
    check_capacity(options, user_options)


def _repaired(u: Tensor, k: int, memory: Memory, scan: Scan | None) -> Sparse:
    z = _quantile(1 - k / memory.real_size(u) / 2)
    if scan is not None and scan.maxima is not None and scan.edge and scan.edge.has_counts:
        chosen = kernels.quantile(u, z, k, scan.maxima, scan.block, scan.edge)
        return Sparse(*chosen, u.numel())
    threshold = threshold_by_rule(u, scan, Rule.NORMAL, k, k + k // 4, scale=z)
    return select_beyond(u, threshold, k, scan)


def _quantile(p: float) -> float:
    """Return Phi^-1(p), finite also if k is 0 or d."""
    return NormalDist().inv_cdf(min(max(p, 1e-9), 1 - 1e-9))


def _mean_and_deviations(u: Tensor, real: int, z: float) -> Tensor:
    """Return mean + z std (N - 1, as torch.std) of the `real` entries; padding does not count."""
    total = u.sum(dtype=torch.float64)
    squares = torch.linalg.vector_norm(u, dtype=torch.float64).square()
    mean = total / real
    variance = (squares - total * mean) / max(1, real - 1)
    return (mean + z * variance.clamp(min=0).sqrt()).float()


def successive_thresholds(threshold: Tensor, tail: Tensor, k: int, times: int) -> list[Tensor]:
    """Return the thresholds in the order of their tests; a threshold that is accepted stays."""
    tested = [threshold]
    for _ in range(times - 1):
        passing = (tail > threshold).sum()
        threshold = torch.where(
            3 * passing < 2 * k,
            threshold * 0.5,
            torch.where(3 * passing > 4 * k, threshold * 1.5, threshold),
        )
        tested.append(threshold)
    return tested


METHOD = Method(gaussiank, capacity=gaussiank_capacity, maxima16=True, check=check_gaussiank)
