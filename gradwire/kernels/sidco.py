"""The two steps of SIDCo: fit a threshold in stages, then adapt the number of stages."""

import math

import torch
from torch import Tensor

from gradwire.kernels.dispatch import versions

FIRST = 0.25
EVERY = 5
FEW = 0.8
MANY = 1.2


def sidco_fit(u: Tensor, step: int, share: float, stages: Tensor, most: int) -> Tensor:
    """The threshold (0-d fp32) after `stages` (0-d int64), 1 to `most`, that aim at `share`.

    Over every `step`-th |u|. One stage: the mean times ln(1 / share). More: the first aims at a
    quarter, each next at the same share of what passed: t = min + (mean - min) ln(1 / that share),
    min and mean over those; where nothing passed, the largest. Versions differ in the last bits of
    the sums, and by what follows from that.
    """
    return _sidco_fit_on(u.device)(u, step, share, stages, most)


def sidco_adapt(
    stages: Tensor, calls: Tensor, ratios: Tensor, count: Tensor, k: int, most: int
) -> None:
    """Count this call, in place; after every fifth, one stage more or less, 1 to `most`.

    One more where the mean of count / k is below 0.8, one less above 1.2. stages, calls: 0-d int64;
    ratios: the sum of count / k since the last change, 0-d fp32.
    """
    _sidco_adapt_on(stages.device)(stages, calls, ratios, count, k, most)


def sidco_fit_torch(u: Tensor, step: int, share: float, stages: Tensor, most: int) -> Tensor:
    """See `sidco_fit`. `low[i]` is minus the (i+1)-th largest magnitude.

    Its survivors are the i + 1 first. From each i one step leads to the next stage's, so a stage
    costs one look into a table.
    """
    seen = u[::step].abs().to(torch.promote_types(u.dtype, torch.float32))
    low = seen.neg().sort().values
    mean = low.cumsum(0) / torch.arange(1, low.numel() + 1, dtype=low.dtype, device=low.device)
    if most == 1:
        return (-mean[-1] * math.log(1 / share)).float()
    log = math.log(FIRST / share) / (stages - 1).clamp(min=1).float()
    edges = torch.lerp(low, mean, log.to(low.dtype).clamp(min=0))
    after = (torch.searchsorted(low, edges) - 1).clamp(min=0)
    place = (torch.searchsorted(low, mean[-1:] * math.log(1 / FIRST)) - 1).clamp(min=0)
    places = [place]
    for _ in range(most - 2):
        places.append(after[places[-1]])
    found = torch.cat([mean[-1:] * math.log(1 / share), edges[torch.cat(places)]])
    return -found.take((stages - 1).long()).float()


def sidco_adapt_torch(
    stages: Tensor, calls: Tensor, ratios: Tensor, count: Tensor, k: int, most: int
) -> None:
    """See `sidco_adapt`."""
    ratios.add_(count, alpha=1 / max(1, k))
    calls.add_(1)
    due = calls % EVERY == 0
    change = (ratios < FEW * EVERY).long() - (ratios > MANY * EVERY).long()
    stages.add_(change * due).clamp_(1, most)
    ratios.mul_(~due)


_sidco_fit_on = versions(sidco_fit_torch, triton="gradwire.kernels.triton.sidco.sidco_fit_triton")
_sidco_adapt_on = versions(
    sidco_adapt_torch, triton="gradwire.kernels.triton.sidco.sidco_adapt_triton"
)
