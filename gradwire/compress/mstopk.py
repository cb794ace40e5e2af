"""MSTopK: a threshold by halving the range between mean and maximum, then k by a random run."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compress.draws import next_number
from gradwire.compress.method import Method
from gradwire.compress.thresholds import (
    capacity_for,
    find_thresholds,
    mean_and_largest,
    select_beyond,
)
from gradwire.errors import ConfigError
from gradwire.kernels.find_by_counts import HALVINGS, Aim
from gradwire.types import Memory, Scan, Sparse

_LISTED = 2.0
"""The entries over k among which a run is drawn."""
_MOST_ROUNDS = 30


def mstopk(
    u: Tensor,
    k: int,
    memory: Memory,
    scan: Scan | None = None,
    *,
    rounds: int = HALVINGS,
    exact: bool = False,
) -> Sparse:
    """The entries beyond a threshold of 25 halvings, and a random run of the next ones up to k.

    MSTopK of Shi et al. (2021): t = mean + ratio (max - mean) of |u|. ratio in [0, 1] is halved
    `rounds` times, up if more than k entries pass and down otherwise. The halvings leave t1, which
    at most k pass, and t2, which more than k pass. All entries beyond t1 are sent. A run of the
    entries between t2 and t1, neighbours in the order of their indices, fills up to k. Where it
    begins is random.

    25 rounds leave few entries between t2 and t1, unless entries are equal. The result is then
    nearly top-k. With 5 rounds it is far from it.
    exact: True: the largest fill up to k, not a run. This is top-k.
    memory["draws"]: the number of runs so far.
    Different here: the mean is the mean of a sample. The run is drawn among the 2 k largest entries
    if more lie beyond t2. If fewer than k entries lie beyond the mean, t2 is 0.
    """
    if k == 0:
        return select_beyond(u, u.new_zeros(()), 0, scan)
    span = torch.stack(mean_and_largest(u, scan))
    low, high = find_thresholds(u, scan, None, span, Aim(k, k, k, k), rounds).unbind()
    if exact:
        return select_beyond(u, low, k, scan)
    listed = select_beyond(u, low, capacity_for(k, u.numel(), _LISTED), scan)
    number = next_number(memory, u.device)
    chosen = kernels.fill_run(listed.indices, listed.values, high, k, number, u.numel())
    return Sparse(*chosen, u.numel())


def check_mstopk(options: Mapping[str, Any], user_options: Mapping[str, Any]) -> None:
    """Raise ConfigError for rounds that do nothing, or that fp32 cannot tell apart."""
    if not 1 <= options["rounds"] <= _MOST_ROUNDS:
        raise ConfigError(
            f"rounds of mstopk must be in 1..{_MOST_ROUNDS}, got {options['rounds']!r}"
        )


METHOD = Method(mstopk, check=check_mstopk)
