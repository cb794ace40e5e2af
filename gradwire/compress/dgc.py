"""DGC: a threshold from a sample, then exactly k of the entries beyond it."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gradwire import kernels
from gradwire.compress.method import Method
from gradwire.compress.thresholds import sample_runs, select_beyond, threshold_by_rule
from gradwire.errors import ConfigError
from gradwire.kernels.threshold import Rule
from gradwire.types import Memory, Scan, Sparse

_SHARE = 0.01
"""The smallest sample, as a share of u."""
_TAIL = 2
"""The number of sampled entries that must be expected beyond the threshold."""


def dgc(
    u: Tensor, k: int, memory: Memory, scan: Scan | None = None, *, sample: float = 0.0
) -> Sparse:
    """A threshold from a sample, lowered until k entries pass; then exactly the k largest.

    The selection of Deep Gradient Compression (Lin et al. 2018), after the authors' code. n_s
    entries are sampled, n_s = max(d/100, 2 d/k) or `sample` times d. The threshold is the ceil(n_s
    k/d)-th largest entry of the sample.
    Different here:
    - The sample consists of runs of eight neighbours.
    - If too few entries pass, their code multiplies the threshold by 0.8, up to ten times. Here the
      threshold falls at once to a group maximum that k groups reach.
    - If too many entries pass, the largest k are taken ("hierarchical selection"). Their code does
      this only beyond 1.3 k. It cuts a smaller surplus by index order, which starves the end of the
      vector.

    So n = k, or all entries that are not zero.
    """
    if k == 0:
        return select_beyond(u, u.new_zeros(()), 0, scan)
    sampled = sample_runs(u, _sample_size(memory.real_size(u), k, sample))
    rank = math.ceil(sampled.numel() * k / memory.real_size(u))
    listed = kernels.select(sampled, min(rank, sampled.numel()))[1]
    return select_beyond(u, threshold_by_rule(u, scan, Rule.LIST, k, listed=listed), k, scan)


def check_dgc(options: Mapping[str, Any], user_options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a sample that is no share."""
    share = options["sample"]
    if not 0 <= share <= 1:
        raise ConfigError(
            f"sample of dgc must be a share in (0, 1], or 0 for max(0.01, 2 / k); got {share!r}"
        )


def _sample_size(size: int, k: int, share: float) -> int:
    """Return the entries of the sample; raise ConfigError if `share` is too small for the tail."""
    least = min(size, math.ceil(_TAIL * size / k))
    if not share:
        return max(least, math.ceil(_SHARE * size))
    if share * size < least:
        raise ConfigError(
            f"sample={share:g} takes {int(share * size)} of {size:,} entries, too few to find the "
            f"threshold of k={k}: at least {least / size:.3g}, or 0 for max(0.01, 2 / k)"
        )
    return math.ceil(share * size)


METHOD = Method(dgc, maxima16=True, check=check_dgc)
