"""The two steps of SIDCo: fit a threshold in stages, and adapt the number of stages."""

import math

import torch
from torch import Tensor

from gradwire.kernels.dispatch import versions

FIRST = 0.25
"""The share that the first of several stages aims at."""
EVERY = 5
"""Calls between two changes of the number of stages."""
FEW = 0.8
"""Below this mean of count / k there is one stage more."""
MANY = 1.2
"""Above this mean of count / k there is one stage less."""


def sidco_fit(u: Tensor, step: int, share: float, stages: Tensor, most: int) -> Tensor:
    """Return the threshold (0-d fp32) after `stages` (0-d int64, 1 to `most`) that aim at `share`.

    Only every `step`-th |u| is looked at. With one stage the threshold is the mean times ln(1 /
    share). With more, the first stage aims at a quarter. Each next stage looks at the magnitudes
    that passed, and computes t = min + (mean - min) ln(1 / stage share) over them. All next stages
    have the same stage share. If nothing passed, t is the largest magnitude. Versions differ in the
    last bits of the sums, and therefore in the threshold.
    """
    return _sidco_fit_on(u.device)(u, step, share, stages, most)


def sidco_adapt(
    stages: Tensor, calls: Tensor, ratios: Tensor, count: Tensor, k: int, most: int
) -> None:
    """Count this call, in place; after every fifth call add or remove a stage, within 1 to `most`.

    A mean of count / k below 0.8 adds one stage, above 1.2 removes one.
    stages, calls: 0-d int64. ratios: 0-d fp32, the sum of count / k since the last change.
    """
    _sidco_adapt_on(stages.device)(stages, calls, ratios, count, k, most)


def sidco_fit_torch(u: Tensor, step: int, share: float, stages: Tensor, most: int) -> Tensor:
    """Compute `sidco_fit` with torch ops.

    `low[i]` is minus the (i + 1)-th largest magnitude. A threshold just below it keeps the first i
    + 1. `after[i]` leads from this stage to the next, so that a stage costs one table lookup.
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
    thresholds = torch.cat([mean[-1:] * math.log(1 / share), edges[torch.cat(places)]])
    return -thresholds.take((stages - 1).long()).float()


def sidco_adapt_torch(
    stages: Tensor, calls: Tensor, ratios: Tensor, count: Tensor, k: int, most: int
) -> None:
    """Compute `sidco_adapt` with torch ops."""
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
