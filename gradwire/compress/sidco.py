"""SIDCo: a threshold from exponential fits to the tail, in stages."""

import math

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compress.method import Method
from gradwire.compress.thresholds import (
    capacity_for,
    capacity_option,
    check_capacity,
    prime_stride,
    select_beyond,
)
from gradwire.types import Memory, Scan, Sparse

_START = 3
"""The number of stages at first."""
_MOST = 6
"""The most stages."""
_SAMPLE = 1 << 17
"""The number of entries that the fits read."""


def sidco(
    u: Tensor, k: int, memory: Memory, scan: Scan | None = None, *, capacity: float = 2.0
) -> Sparse:
    """A threshold from exponential fits, each to the entries beyond the last; the stages adapt.

    SIDCo-E of Abdelmoniem et al. (2021). With one stage, t = mean |u| ln(d/k). With M stages, the
    first aims at a quarter of the entries. Each later stage aims at the share r = (4k/d)^(1/(M-1))
    of the entries that passed. Its threshold is t = min + (mean - min) ln(1/r), with min and mean
    over those entries.

    Every five calls M follows the mean of n/k. Above 1.2 there is one stage less, below 0.8 one
    more, with 1 <= M <= log2(d/k). M starts with 3. If more than `capacity` times k entries pass,
    the largest are taken. memory holds "stages", "calls" and "ratios" (the sum of n/k).

    On tails lighter than exponential, more stages choose more entries. On heavier tails more stages
    choose fewer, and the rule can run the wrong way: to 0.4 k on t3 at density 0.01. No entry of a
    constant u passes.
    Different here: there are at most 6 stages, and the fits read a sample of 131,072 entries
    instead of all.
    """
    share = k / memory.real_size(u)
    most_stages = min(_MOST, max(1, math.ceil(math.log2(1 / share)))) if k else 1
    for name, start in (("stages", min(_START, most_stages)), ("calls", 0), ("ratios", 0.0)):
        if name not in memory:
            dtype = torch.float32 if isinstance(start, float) else torch.int64
            memory[name] = torch.full((), start, dtype=dtype, device=u.device)
    stages, every = memory["stages"], prime_stride(u.numel(), _SAMPLE)
    threshold = kernels.sidco_fit(u, every, share, stages, most_stages) if k else u.new_zeros(())
    sparse = select_beyond(u, threshold, capacity_for(k, u.numel(), capacity), scan)
    kernels.sidco_adapt(stages, memory["calls"], memory["ratios"], sparse.count, k, most_stages)
    return sparse


METHOD = Method(sidco, capacity=capacity_option, check=check_capacity)
