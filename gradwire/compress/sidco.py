"""SIDCo: a threshold from exponential fits to the tail, in stages."""

import math

import torch
from torch import Tensor

from gradwire.compress.estimate import beyond, room, sample
from gradwire.types import Memory, Scan, Sparse

FIRST = 0.25
START = 3
EVERY = 5
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
            memory[name] = torch.full((), start, device=u.device)
    edge = fit(sample(u, SAMPLE), share, memory["stages"], most) if k else u.new_zeros(())
    sparse = beyond(u, edge, room(k, u.numel(), capacity), scan)
    _adapt(memory, sparse.count, k, most)
    return sparse


def fit(seen: Tensor, share: float, stages: Tensor, most: int) -> Tensor:
    """The threshold after `stages` (0-d) of at most `most` stages that aim at `share`.

    `low[i]` is minus the (i+1)-th largest magnitude; its survivors are the i + 1 first. From each i
    one step leads to the next stage's, so a stage costs one look into a table.
    """
    low = seen.neg().sort().values
    mean = low.cumsum(0) / torch.arange(1, low.numel() + 1, dtype=low.dtype, device=low.device)
    if most == 1:
        return (-mean[-1] * math.log(1 / share)).float()
    log = math.log(FIRST / share) / (stages - 1).clamp(min=1)
    edges = torch.lerp(low, mean, log.to(low.dtype).clamp(min=0))
    after = (torch.searchsorted(low, edges) - 1).clamp(min=0)
    place = (torch.searchsorted(low, mean[-1:] * math.log(1 / FIRST)) - 1).clamp(min=0)
    places = [place]
    for _ in range(most - 2):
        places.append(after[places[-1]])
    found = torch.cat([mean[-1:] * math.log(1 / share), edges[torch.cat(places)]])
    return -found.take((stages - 1).long()).float()


def _adapt(memory: Memory, count: Tensor, k: int, most: int) -> None:
    """Count this call; after every fifth, one stage more or less."""
    stages, calls, ratios = memory["stages"], memory["calls"], memory["ratios"]
    ratios.add_(count, alpha=1 / max(1, k))
    calls.add_(1)
    due = calls % EVERY == 0
    change = (ratios < 0.8 * EVERY).long() - (ratios > 1.2 * EVERY).long()
    stages.add_(change * due).clamp_(1, most)
    ratios.mul_(~due)
