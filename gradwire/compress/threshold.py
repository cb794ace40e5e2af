"""Hard threshold: everything beyond a fixed magnitude."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compress.method import Method
from gradwire.compress.thresholds import (
    SAMPLE_SIZE,
    capacity_for,
    capacity_option,
    check_capacity,
    prime_stride,
    select_beyond,
)
from gradwire.errors import ConfigError
from gradwire.kernels.select import block_size
from gradwire.kernels.threshold import just_below
from gradwire.types import Memory, Scan, Sparse


def threshold(
    u: Tensor,
    k: int,
    memory: Memory,
    scan: Scan | None = None,
    *,
    value: float = 0.0,
    capacity: float = 4.0,
) -> Sparse:
    """Every |u| of at least a fixed magnitude; the number of entries varies from step to step.

    Hard threshold of Sahu et al. (2021): the smallest total error over a run for a total budget.
    `value` is the magnitude. Theirs is 1 / (2 sqrt(k)) for a u of norm 1. With `value` 0 the
    magnitude is the norm of the first u that is not zero, over 2 sqrt(k). The norm comes from a
    sample, and the magnitude is kept in memory["threshold"]. On light tails no entry reaches the
    magnitude at first; the residual adds up until entries do. If more than `capacity` times k
    entries pass, the largest are taken.
    """
    if value:
        below = float(just_below(torch.tensor(float(value), dtype=torch.float32)))
        cutoff = torch.full((), below, dtype=torch.float32, device=u.device)
    else:
        if "threshold" not in memory:
            memory["threshold"] = torch.zeros((), dtype=torch.float32, device=u.device)
        every = prime_stride(u.numel(), SAMPLE_SIZE)
        scale = (memory.real_size(u) / -(-u.numel() // every) / max(1, k)) ** 0.5 / 2
        cutoff = kernels.first_threshold(memory["threshold"], u, every, scale)
    return select_beyond(u, cutoff, capacity_for(k, u.numel(), capacity), scan)


def check_threshold(options: Mapping[str, Any], user_options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a magnitude below 0, or a capacity below 1."""
    value = options["value"]
    if not 0 <= value < math.inf:
        raise ConfigError(
            f"value of threshold must be a magnitude above 0, or 0 to take it from the first u; "
            f"got {value!r}"
        )
    check_capacity(options, user_options)


METHOD = Method(
    threshold,
    capacity=capacity_option,
    block=lambda k, size, device, options: block_size(
        size, capacity_option(k, size, options), device
    ),
    maxima16=True,
    check=check_threshold,
)
