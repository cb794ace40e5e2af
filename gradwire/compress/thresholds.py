"""Samples and thresholds: facts about u that do not need all of u."""

import functools
import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.errors import ConfigError
from gradwire.kernels.find_by_counts import HALVINGS, Aim
from gradwire.types import Scan, Sparse

SAMPLE_SIZE = 1 << 14
"""The number of entries or group maxima that are read of a large vector.

One block of a GPU, or one thread of a CPU, can read this number, so none waits for another. A mean
is then off by 0.8 % if the spread equals the mean.
"""


def sample_magnitudes(u: Tensor, entries: int) -> Tensor:
    """Return |u| at every s-th entry, at least `entries` of them if u has as many; s is a prime.

    s is a prime because layers repeat with periods that are products of small numbers.
    """
    return (
        u[:: prime_stride(u.numel(), entries)].abs().to(torch.promote_types(u.dtype, torch.float32))
    )


@functools.cache
def prime_stride(size: int, entries: int) -> int:
    """Return the largest prime step, or 1, that leaves at least `entries` of `size`."""
    step = size // max(1, entries)
    while step > 1 and any(step % f == 0 for f in range(2, math.isqrt(step) + 1)):
        step -= 1
    return max(1, step)


def normal_quantile(p: float) -> float:
    """Return Phi^-1(p), finite also if k is 0 or d."""
    return NormalDist().inv_cdf(min(max(p, 1e-9), 1 - 1e-9))


def mean_and_largest(u: Tensor, scan: Scan | None) -> tuple[Tensor, Tensor]:
    """Return the mean |u| of a sample of u, and the largest |u|, both fp32 (0-d)."""
    mean = sample_magnitudes(u, SAMPLE_SIZE).mean(dtype=torch.float64).float()
    whole = u if scan is None or scan.maxima is None else scan.maxima
    largest = torch.linalg.vector_norm(whole, float("inf")).float()
    # A sample of a vector whose magnitudes are all alike may round above them.
    return torch.minimum(mean, largest), largest


def search_ladder(u: Tensor, scan: Scan | None, ladder: Tensor, aim: Aim) -> Tensor:
    """Return the threshold that `kernels.find_by_counts` finds from a ladder of tests."""
    return find_thresholds(u, scan, ladder, None, aim)[0]


def find_thresholds(
    u: Tensor, scan: Scan | None, ladder: Tensor | None, span: Tensor | None, aim: Aim,
    halvings: int = HALVINGS,
) -> Tensor:  # fmt: skip
    """Return the result of `kernels.find_by_counts`, with the maxima of the scan if there are any.

    The number of entries that pass is counted, so it is known however u is distributed.
    """
    maxima, block = (None, 0) if scan is None else (scan.maxima, scan.block)
    return kernels.find_by_counts(u, ladder, span, aim, maxima, block, halvings)


def select_beyond(u: Tensor, threshold: Tensor, capacity: int, scan: Scan | None) -> Sparse:
    """Return the entries with |u| > threshold, at most the `capacity` largest."""
    known = () if scan is None else (scan.maxima, scan.block, scan.edge)
    indices, values, count = kernels.above(u, threshold.float(), capacity, *known)
    return Sparse(indices, values, count, u.numel())


def check_capacity(options: Mapping[str, Any], user_options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option `capacity`, in multiples of k, that cannot hold k entries."""
    capacity = options["capacity"]
    if not 1 <= capacity < math.inf:
        raise ConfigError(
            f"capacity must be at least 1, it is the room in a message over k; got {capacity!r}"
        )


def capacity_for(k: int, size: int, capacity: float) -> int:
    """Return `capacity` times k entries, at most `size`."""
    return min(size, round(capacity * k))


def capacity_option(k: int, size: int, options: Mapping[str, Any]) -> int:
    """Return the entries that the option `capacity`, in multiples of k, makes room for."""
    return capacity_for(k, size, options["capacity"])
