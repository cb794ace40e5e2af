"""SIDCo: a threshold from exponential fits to the tail, in stages."""

import math

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compress.thresholds import beyond, room, stride
from gradwire.types import Memory, Scan, Sparse

START = 3
MOST = 6
SAMPLE = 1 << 17


def sidco(
    u: Tensor, k: int, memory: Memory, scan: Scan | None = None, *, capacity: float = 2.0
) -> Sparse:
    """A threshold from exponential fits to what passed the last one; the stages adapt.

    SIDCo-E of Abdelmoniem et al. (2021). One stage: t = mean |u| ln(d/k). M stages: the first aims
    at a quarter, each next at the share r = (4k/d)^(1/(M-1)) of what passed: t = min + (mean - min)
    ln(1/r), min and mean over those. Every five calls M follows the mean of n/k: above 1.2 one
    less, below 0.8 one more, 1 <= M <= log2(d/k). It starts with 3. Of more than `capacity` times k
    entries the largest are taken. memory holds "stages", "calls" and "ratios", the sum of n/k.
    More stages choose more on tails lighter than exponential; on heavier ones they choose less, and
    the rule can run the wrong way: to 0.4 k on t3 at density 0.01. Of a constant u nothing passes.
    Different here: at most 6 stages, and the fits see a sample of 131,072 entries, not all.
    """
    share = k / memory.real(u)
    most = min(MOST, max(1, math.ceil(math.log2(1 / share)))) if k else 1
    for name, start in (("stages", min(START, most)), ("calls", 0), ("ratios", 0.0)):
        if name not in memory:
            dtype = torch.float32 if isinstance(start, float) else torch.int64
            memory[name] = torch.full((), start, dtype=dtype, device=u.device)
    stages, step = memory["stages"], stride(u.numel(), SAMPLE)
    edge = kernels.sidco_fit(u, step, share, stages, most) if k else u.new_zeros(())
    sparse = beyond(u, edge, room(k, u.numel(), capacity), scan)
    kernels.sidco_adapt(stages, memory["calls"], memory["ratios"], sparse.count, k, most)
    return sparse
