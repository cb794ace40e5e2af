"""Hard threshold: everything beyond a fixed magnitude."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compress.thresholds import SEEN, beyond, check_capacity, room, stride
from gradwire.errors import ConfigError
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
    """Every |u| of at least a fixed magnitude; how many varies from step to step.

    Hard threshold of Sahu et al. (2021): the smallest total error over a run for a total budget.
    `value` is that magnitude. Theirs is 1 / (2 sqrt(k)) for a u of norm 1; with `value` 0 it is the
    norm of the first u that is not zero, by a sample, over 2 sqrt(k), kept in memory["threshold"].
    On light tails nothing reaches that at first: the entries add up until they do. Of more than
    `capacity` times k entries the largest are taken.
    """
    if value:
        below = float(just_below(torch.tensor(float(value), dtype=torch.float32)))
        edge = torch.full((), below, dtype=torch.float32, device=u.device)
    else:
        if "threshold" not in memory:
            memory["threshold"] = torch.zeros((), dtype=torch.float32, device=u.device)
        step = stride(u.numel(), SEEN)
        scale = (memory.real(u) / -(-u.numel() // step) / max(1, k)) ** 0.5 / 2
        edge = kernels.first_threshold(memory["threshold"], u, step, scale)
    return beyond(u, edge, room(k, u.numel(), capacity), scan)


def check_threshold(options: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ConfigError for a magnitude below 0, or a capacity below 1."""
    value = options["value"]
    if not 0 <= value < math.inf:
        raise ConfigError(
            f"value of threshold must be a magnitude above 0, or 0 to take it from the first u; "
            f"got {value!r}"
        )
    check_capacity(options, given)
