"""What the methods need to know of u without reading all of it."""

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

SEEN = 1 << 14
"""Entries or group maxima that are looked at in large vectors: few enough for one block of a GPU,
and for one thread of a CPU, so none waits for another. A mean is then off by 0.8 % where the spread
equals the mean."""

RANKED = 3900
"""Group maxima that are ranked, at least: with what a prime step leaves over mostly below 4096, the
tile of one program on a GPU."""

RUN = 8
"""Neighbours that are read together: on a GPU one alone costs as much as these 32 bytes."""


def sample(u: Tensor, entries: int) -> Tensor:
    """|u| at every s-th entry, at least `entries` of them where there are; s is a prime.

    A prime, because layers repeat with periods that are products of small numbers.
    """
    return u[:: stride(u.numel(), entries)].abs().to(torch.promote_types(u.dtype, torch.float32))


def runs(u: Tensor, entries: int) -> Tensor:
    """|u| in runs of eight neighbours, at least `entries` where there are; a prime apart, times 8.

    For samples so large that reading them takes time; neighbours are not quite independent.
    """
    step = stride(u.numel() // RUN, -(-entries // RUN))
    seen = u if step == 1 else u.unfold(0, RUN, RUN * step)
    return seen.abs().to(torch.promote_types(u.dtype, torch.float32)).flatten()


@functools.cache
def stride(size: int, entries: int) -> int:
    """The largest prime step, or 1, that leaves at least `entries` of `size`."""
    step = size // max(1, entries)
    while step > 1 and any(step % f == 0 for f in range(2, math.isqrt(step) + 1)):
        step -= 1
    return max(1, step)


def level(
    u: Tensor, scan: Scan | None, rule: Rule, *counts: int, listed: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """The threshold of a rule, with what `counts` entries reach; see `kernels.find_threshold`.

    The mean is that of a sample of u. LIST is asked of `listed`.
    """
    maxima, every, ranks = reached(u, scan, *counts)
    whole = u if scan is None or scan.maxima is None else maxima
    if listed is None:
        return kernels.find_threshold(
            rule, u, stride(u.numel(), SEEN), maxima, every, ranks, scale, whole
        )
    return kernels.find_threshold(rule, listed, 1, maxima, every, ranks)


def reached(u: Tensor, scan: Scan | None, *counts: int) -> tuple[Tensor, int, list[int]]:
    """Magnitudes, a step, and for each count, ascending, a rank: so many entries reach what has
    that rank among every step-th of these.

    The k-th largest group maximum: k groups hold an entry as large. Of many maxima every s-th is
    looked at, for a rank six standard deviations beyond k / s; without maxima, a sample of u.
    """
    if scan is None or scan.maxima is None:
        seen, every = sample(u, SEEN).float(), 1
        step = stride(u.numel(), SEEN)
    else:
        seen, step = scan.maxima, stride(scan.maxima.numel(), RANKED)
        every = step
    return seen, every, [max(1, _sure_rank(count, step)) for count in counts]


def _sure_rank(count: int, step: int) -> int:
    if step == 1:
        return count
    return math.ceil(count / step + 6 * math.sqrt(count / step))


def tail(u: Tensor, k: int, scan: Scan | None) -> Tensor:
    """The k largest |u|, largest first: n(t) for every t that matters when comparing n with k."""
    maxima, block = (scan.maxima, scan.block) if scan is not None else (None, 0)
    values = kernels.select(u, min(k, u.numel()), maxima, block)[1]
    return values.abs().float().sort(descending=True).values


def beyond(u: Tensor, threshold: Tensor, capacity: int, scan: Scan | None) -> Sparse:
    """The entries with |u| > threshold, at most the `capacity` largest."""
    known = () if scan is None else (scan.maxima, scan.block, scan.edge)
    indices, values, count = kernels.above(u, threshold.float(), capacity, *known)
    return Sparse(indices, values, count, u.numel())


def check_capacity(options: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option `capacity`, in multiples of k, that cannot hold k entries."""
    capacity = options["capacity"]
    if not 1 <= capacity < math.inf:
        raise ConfigError(
            f"capacity must be at least 1, it is the room in a message over k; got {capacity!r}"
        )


def room(k: int, size: int, capacity: float) -> int:
    """Entries that `capacity` times k stands for, of `size`."""
    return min(size, round(capacity * k))
