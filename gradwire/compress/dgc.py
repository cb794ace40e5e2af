"""DGC: a threshold from a random sample; the k largest only if too many entries pass."""

import functools
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compress.draws import next_number
from gradwire.compress.method import Method
from gradwire.compress.thresholds import prime_stride, search_ladder, select_beyond
from gradwire.errors import ConfigError
from gradwire.kernels.find_by_counts import Aim
from gradwire.kernels.threshold import just_below
from gradwire.types import Memory, Scan, Sparse

SHARE = 0.01
"""The smallest sample, as a share of u."""
TAIL = 2
"""The number of sampled entries that must be expected beyond the threshold."""
LEAST, MOST = Fraction(8, 10), Fraction(13, 10)
"""Fewer than LEAST times k entries lower the threshold; more than MOST times k are cut to k."""
LOWERED = 0.8
"""The factor on a threshold that too few entries reach."""
ROUNDS = 10
"""The most times that the threshold is lowered."""
RUN_LENGTH = 8
"""The number of neighbours read together: 32 bytes cost a GPU as much as one entry."""


def dgc(
    u: Tensor,
    k: int,
    memory: Memory,
    scan: Scan | None = None,
    *,
    sample: float = 0.0,
    exact: bool = False,
) -> Sparse:
    """The entries beyond a threshold from a random sample: 0.8 k to 1.3 k; more are cut to k.

    Hierarchical sampling of Deep Gradient Compression (Lin et al. 2018), with the constants of the
    authors' code:
    1. n_s entries are sampled at random, n_s = max(d/100, 2 d/k) or `sample` times d. t is the
       ceil(n_s k/d)-th largest |u| of the sample.
    2. While fewer than 0.8 k entries reach t, t is multiplied by 0.8, at most ten times.
    3. If more than 1.3 k entries reach t, the k-th largest of them becomes t.

    What reaches t is sent. Ten rounds may end with fewer than 0.8 k entries. Equal entries that do
    not fit into 1.3 k wait in the residual.
    exact: True: at least k entries must reach t, and the k largest of them are sent. This is top-k.
    memory["draws"]: the number of samples so far.
    Different here: the sample consists of runs of eight neighbours, at even distances from a random
    start. Theirs are single entries. Their code also cuts a surplus below 1.3 k, by position, which
    starves the end of the vector.
    """
    if k == 0:
        return select_beyond(u, u.new_zeros(()), 0, scan)
    size = memory.real_size(u)
    sampled = sample_runs(u, sample_size(size, k, sample), next_number(memory, u.device))
    rank = min(sampled.numel(), math.ceil(sampled.numel() * k / size))
    start = just_below(kernels.select(sampled, rank)[1].amin().float())
    aim = Aim(math.ceil(LEAST * k), math.floor(MOST * k), k, k)
    if exact:
        aim = Aim(k, u.numel(), k, k)
    threshold = search_ladder(u, scan, start * _lowering(u.device, exact), aim)
    return select_beyond(u, threshold, dgc_capacity(k, u.numel(), {"exact": exact}), scan)


def dgc_capacity(k: int, size: int, options: Mapping[str, Any]) -> int:
    """Return the most entries that pass uncut."""
    return k if options["exact"] else min(size, math.floor(MOST * k))


def sample_runs(u: Tensor, entries: int, number: Tensor) -> Tensor:
    """Return |u| in runs of eight neighbours, at least `entries` if u has as many.

    The distance between runs is a prime times 8, for layers repeat with periods that are products
    of small numbers. `number` (0-d int64) says where the first run is.
    """
    rows = u.numel() // RUN_LENGTH
    every = prime_stride(rows, -(-entries // RUN_LENGTH))
    if every == 1:
        kept = u
    else:
        count = torch.arange(rows // every, dtype=torch.int64, device=u.device)
        runs = u[: rows * RUN_LENGTH].view(rows, RUN_LENGTH)
        kept = runs.index_select(0, count * every + number % every).flatten()
    return kept.abs().to(torch.promote_types(u.dtype, torch.float32))


@functools.lru_cache(maxsize=16)
def _lowering(device: torch.device, to_zero: bool) -> Tensor:
    """Return the factors on the threshold: 1, 0.8, 0.64, ...; and 0 if asked for."""
    factors = [*(LOWERED**i for i in range(ROUNDS + 1)), *([0.0] if to_zero else [])]
    return torch.tensor(factors, dtype=torch.float32, device=device)


def sample_size(size: int, k: int, share: float) -> int:
    """Return the entries of the sample; raise ConfigError if `share` is too small for the tail."""
    least = min(size, math.ceil(TAIL * size / k))
    if not share:
        return max(least, math.ceil(SHARE * size))
    if share * size < least:
        raise ConfigError(
            f"sample={share:g} takes {int(share * size)} of {size:,} entries, too few to find the "
            f"threshold of k={k}: at least {least / size:.3g}, or 0 for max(0.01, 2 / k)"
        )
    return math.ceil(share * size)


def check_dgc(options: Mapping[str, Any], user_options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a sample that is no share."""
    share = options["sample"]
    if not 0 <= share <= 1:
        raise ConfigError(
            f"sample of dgc must be a share in (0, 1], or 0 for max(0.01, 2 / k); got {share!r}"
        )


METHOD = Method(dgc, capacity=dgc_capacity, maxima16=True, check=check_dgc)
