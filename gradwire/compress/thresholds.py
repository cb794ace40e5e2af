"""Samples and thresholds: facts about u that do not need all of u."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.errors import ConfigError
from gradwire.kernels.threshold import Rule
from gradwire.types import Scan, Sparse

SAMPLE_SIZE = 1 << 14
"""The number of entries or group maxima that are read of a large vector.

One block of a GPU, or one thread of a CPU, can read this number, so none waits for another. A mean
is then off by 0.8 % if the spread equals the mean.
"""

RANKED_MAXIMA = 3900
"""The least number of group maxima that are ranked.

With the surplus that a prime stride leaves, the number is mostly below 4096, the tile of one
program on a GPU.
"""

RUN_LENGTH = 8
"""The number of neighbours read together: 32 bytes cost a GPU as much as one entry."""


def sample_magnitudes(u: Tensor, entries: int) -> Tensor:
    """Return |u| at every s-th entry, at least `entries` of them if u has as many; s is a prime.

    s is a prime because layers repeat with periods that are products of small numbers.
    """
    return (
        u[:: prime_stride(u.numel(), entries)].abs().to(torch.promote_types(u.dtype, torch.float32))
    )


def sample_runs(u: Tensor, entries: int) -> Tensor:
    """Return |u| in runs of eight neighbours, at least `entries` if u has as many.

    The distance between runs is a prime times 8. Runs are for samples so large that reading them
    takes time. Neighbours are not quite independent.
    """
    every = prime_stride(u.numel() // RUN_LENGTH, -(-entries // RUN_LENGTH))
    kept = u if every == 1 else u.unfold(0, RUN_LENGTH, RUN_LENGTH * every)
    return kept.abs().to(torch.promote_types(u.dtype, torch.float32)).flatten()


@functools.cache
def prime_stride(size: int, entries: int) -> int:
    """Return the largest prime step, or 1, that leaves at least `entries` of `size`."""
    step = size // max(1, entries)
    while step > 1 and any(step % f == 0 for f in range(2, math.isqrt(step) + 1)):
        step -= 1
    return max(1, step)


def threshold_by_rule(
    u: Tensor, scan: Scan | None, rule: Rule, *counts: int, listed: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """Return the threshold of a rule, capped at a magnitude that `counts` entries reach.

    See `kernels.find_threshold`. The mean is the mean of a sample of u. Rule.LIST reads `listed`.
    """
    maxima, every, ranks = count_bounds(u, scan, *counts)
    whole = u if scan is None or scan.maxima is None else maxima
    if listed is None:
        return kernels.find_threshold(
            rule, u, prime_stride(u.numel(), SAMPLE_SIZE), maxima, every, ranks, scale, whole
        )
    return kernels.find_threshold(rule, listed, 1, maxima, every, ranks)


def count_bounds(u: Tensor, scan: Scan | None, *counts: int) -> tuple[Tensor, int, list[int]]:
    """Return (magnitudes, stride, ranks), lower bounds for the k-th largest |u|.

    At least counts[i] entries of u reach the ranks[i]-th largest of magnitudes[::stride]. `counts`
    ascends. The magnitudes are group maxima. The k-th largest maximum is such a bound, because k
    groups hold an entry as large. Of many maxima every s-th is ranked, at a rank six standard
    deviations beyond k / s. Without maxima the magnitudes are a sample of u.
    """
    if scan is None or scan.maxima is None:
        magnitudes, every = sample_magnitudes(u, SAMPLE_SIZE).float(), 1
        spacing = prime_stride(u.numel(), SAMPLE_SIZE)
    else:
        magnitudes, spacing = scan.maxima, prime_stride(scan.maxima.numel(), RANKED_MAXIMA)
        every = spacing
    return magnitudes, every, [max(1, _sure_rank(count, spacing)) for count in counts]


def _sure_rank(count: int, step: int) -> int:
    """Return the rank in every `step`-th maximum at which `count` maxima are surely reached."""
    if step == 1:
        return count
    return math.ceil(count / step + 6 * math.sqrt(count / step))


def largest_magnitudes(u: Tensor, k: int, scan: Scan | None) -> Tensor:
    """Return the k largest |u|, largest first.

    The list gives n(t), the number of entries beyond t, for every t at which n <= k.
    """
    maxima, block = (scan.maxima, scan.block) if scan is not None else (None, 0)
    values = kernels.select(u, min(k, u.numel()), maxima, block)[1]
    return values.abs().float().sort(descending=True).values


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
