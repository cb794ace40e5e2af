"""The reference of fit: plain torch, any device, no host sync."""

import math

import torch
from torch import Tensor

FIRST = 0.25


def fit_torch(u: Tensor, step: int, share: float, stages: Tensor, most: int) -> Tensor:
    """See `fit`. `low[i]` is minus the (i+1)-th largest magnitude; its survivors are the i + 1
    first. From each i one step leads to the next stage's, so a stage costs one look into a table.
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
