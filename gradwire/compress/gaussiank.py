"""Gaussian_k: a threshold from the quantile of a normal distribution."""

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compress.thresholds import beyond, check_capacity, level, room, tail
from gradwire.errors import ConfigError, unknown
from gradwire.kernels.threshold import Rule
from gradwire.types import Memory, Scan, Sparse

TESTS = {"paper": 4, "released": 3}
VARIANTS = ("repaired", *TESTS)


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

    Gaussian_k of Shi et al. (2019, arXiv 1911.08772).
    paper: Algorithm 1 to the letter. t = mean + z std, z = Phi^-1(1 - k/d); at most four times (i =
        0..3): n = count(|u| > t); n < 2k/3: t /= 2; n > 4k/3: t *= 1.5; else stop. The entries of
        the last test are sent, the last change of t is not used. On N(0,1) at density 0.001 the
        tests count 2.03, 0.004, 20.5 and 0.53 times k.
    released: as the authors' code has it. z = Phi^-1(1 - k/2d), three tests.
    Both select what they select, 0 to 20 times k; of more than `capacity` times k the largest are
    taken, and the rest is kept.
    repaired: t = z sqrt(mean u^2), z = Phi^-1(1 - k/2d), held between two group maxima that k and
        1.25 k groups reach, so that n >= k; the k largest of these are taken: n = k, or all that
        are not zero. The mean is that of a sample. On CUDA the scan takes it on its way and the
        selection finds t, from the second step on.
    """
    if variant == "repaired":
        return _repaired(u, k, memory, scan)
    share = k / memory.real(u)
    p = 1 - share if variant == "paper" else 1 - share / 2
    start = _mean_and_deviations(u, memory.real(u), _quantile(p))
    found = thresholds(start, tail(u, 4 * k // 3 + 1, scan), k, TESTS[variant])
    return beyond(u, found[-1], room(k, u.numel(), capacity), scan)


def gaussiank_capacity(k: int, size: int, options: Mapping[str, Any]) -> int:
    """k, or what the variants that do not find k are cut at."""
    return k if options["variant"] == "repaired" else room(k, size, options["capacity"])


def check_gaussiank(options: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ConfigError for an unknown variant, or a capacity that has no effect."""
    variant = options["variant"]
    if variant not in VARIANTS:
        raise unknown("variant of gaussiank", variant, VARIANTS)
    if variant == "repaired" and "capacity" in given:
        raise ConfigError(
            "capacity has no effect on gaussiank's variant 'repaired', which finds k entries: "
            "leave it out, or use variant='paper' or 'released'"
        )
    check_capacity(options, given)


def _repaired(u: Tensor, k: int, memory: Memory, scan: Scan | None) -> Sparse:
    z = _quantile(1 - k / memory.real(u) / 2)
    if scan is not None and scan.maxima is not None and scan.edge and scan.edge.has_counts:
        chosen = kernels.quantile(u, z, k, scan.maxima, scan.block, scan.edge)
        return Sparse(*chosen, u.numel())
    found = level(u, scan, Rule.NORMAL, k, k + k // 4, scale=z)
    return beyond(u, found, k, scan)


def _quantile(p: float) -> float:
    """Phi^-1(p), finite also where k is 0 or d."""
    return NormalDist().inv_cdf(min(max(p, 1e-9), 1 - 1e-9))


def _mean_and_deviations(u: Tensor, real: int, z: float) -> Tensor:
    """mean + z std (N - 1, as torch.std) of the `real` entries; padding is zero and not counted."""
    total = u.sum(dtype=torch.float64)
    squares = torch.linalg.vector_norm(u, dtype=torch.float64).square()
    mean = total / real
    variance = (squares - total * mean) / max(1, real - 1)
    return (mean + z * variance.clamp(min=0).sqrt()).float()


def thresholds(threshold: Tensor, tail: Tensor, k: int, times: int) -> list[Tensor]:
    """The thresholds that are tested one after the other; where one is accepted it stays."""
    found = [threshold]
    for _ in range(times - 1):
        n = (tail > threshold).sum()
        threshold = torch.where(
            3 * n < 2 * k, threshold * 0.5, torch.where(3 * n > 4 * k, threshold * 1.5, threshold)
        )
        found.append(threshold)
    return found
