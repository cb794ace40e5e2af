"""Trimmed top-k: a threshold that steps down from the maximum until k entries pass."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradwire.compress.method import Method
from gradwire.compress.thresholds import (
    capacity_for,
    check_capacity,
    mean_and_largest,
    search_ladder,
    select_beyond,
)
from gradwire.errors import ConfigError
from gradwire.kernels.find_by_counts import Aim
from gradwire.types import Memory, Scan, Sparse

STEP = 0.2
"""One step down, as a part of the way from the mean to the maximum."""
_RUNGS = 40
"""The most steps; the last test is then 0."""


def trimmed(
    u: Tensor,
    k: int,
    memory: Memory,
    scan: Scan | None = None,
    *,
    capacity: float = 4.0,
    exact: bool = False,
) -> Sparse:
    """The entries beyond a threshold that falls in steps of 0.2 from max |u| until k pass.

    Trimmed top-k of RedSync (Fang et al. 2018): t = mean + ratio (max - mean) of |u|. ratio is 0.8,
    and falls by 0.2 until at least k entries pass t.

    The steps are coarse, so 1.5 k to 390 k entries pass on usual data. What passes is sent, up to
    `capacity` times k. If more pass, the largest are sent and the others wait in the residual.
    exact: True: only the k largest of them are sent. RedSync ends so, and the result is top-k; the
    operators that others compare with leave this out.
    Different here: the mean is the mean of a sample. ratio goes on falling below 0 until t is 0.
    """
    room = k if exact else capacity_for(k, u.numel(), capacity)
    if k == 0:
        return select_beyond(u, u.new_zeros(()), 0, scan)
    mean, largest = mean_and_largest(u, scan)
    tests = (mean + _ratios(u.device) * (largest - mean)).clamp(min=0)
    tests = torch.cat([tests, tests.new_zeros(1)])
    return select_beyond(u, search_ladder(u, scan, tests, Aim(k, u.numel(), k, k)), room, scan)


@functools.lru_cache(maxsize=16)
def _ratios(device: torch.device) -> Tensor:
    """Return 0.8, 0.6, 0.4, ..."""
    ratios = [1 - STEP * (i + 1) for i in range(_RUNGS)]
    return torch.tensor(ratios, dtype=torch.float32, device=device)


def trimmed_capacity(k: int, size: int, options: Mapping[str, Any]) -> int:
    """Return the room in a message: k with the exact cut, otherwise the option `capacity`."""
    return k if options["exact"] else capacity_for(k, size, options["capacity"])


def check_trimmed(options: Mapping[str, Any], user_options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a capacity that is too small, or that has no effect."""
    if options["exact"] and "capacity" in user_options:
        raise ConfigError("capacity has no effect on trimmed with exact=True, which sends k")
    check_capacity(options, user_options)


METHOD = Method(trimmed, capacity=trimmed_capacity, check=check_trimmed)
