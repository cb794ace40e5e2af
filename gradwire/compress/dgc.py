"""DGC: a threshold from a sample, then exactly k of what passes."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gradwire import kernels
from gradwire.compress.thresholds import beyond, level, runs
from gradwire.errors import ConfigError
from gradwire.kernels.threshold import Rule
from gradwire.types import Memory, Scan, Sparse

SHARE = 0.01
TAIL = 2
"""Entries of the sample that must be expected beyond the threshold."""


def dgc(
    u: Tensor, k: int, memory: Memory, scan: Scan | None = None, *, sample: float = 0.0
) -> Sparse:
    """A threshold from a sample, lowered until k entries pass; then exactly the k largest.

    The selection of Deep Gradient Compression (Lin et al. 2018), after the authors' code: of the
    n_s sampled entries the ceil(n_s k/d)-th largest is the threshold, n_s = max(d/100, 2 d/k) or
    `sample` times d. Different here: the sample is of runs of eight neighbours. Too few that pass:
    their code multiplies the threshold by 0.8 up to ten times; here it falls at once to a group
    maximum that k groups reach. Too many: top-k among these ("hierarchical selection"); their code
    does that only beyond 1.3 k and cuts smaller surplus by index order, which starves the end of
    the vector. So n = k, or all that are not zero.
    """
    if k == 0:
        return beyond(u, u.new_zeros(()), 0, scan)
    seen = runs(u, sampled(memory.real(u), k, sample))
    r = math.ceil(seen.numel() * k / memory.real(u))
    listed = kernels.select(seen, min(r, seen.numel()))[1]
    return beyond(u, level(u, scan, Rule.LIST, k, listed=listed), k, scan)


def check_dgc(options: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ConfigError for a sample that is no share."""
    share = options["sample"]
    if not 0 <= share <= 1:
        raise ConfigError(
            f"sample of dgc must be a share in (0, 1], or 0 for max(0.01, 2 / k); got {share!r}"
        )


def sampled(size: int, k: int, share: float) -> int:
    """Entries of the sample; raises where a given share is too small to hold any of the tail."""
    least = min(size, math.ceil(TAIL * size / k))
    if not share:
        return max(least, math.ceil(SHARE * size))
    if share * size < least:
        raise ConfigError(
            f"sample={share:g} takes {int(share * size)} of {size:,} entries, too few to find the "
            f"threshold of k={k}: at least {least / size:.3g}, or 0 for max(0.01, 2 / k)"
        )
    return math.ceil(share * size)
