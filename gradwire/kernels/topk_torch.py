"""The reference of topk: plain torch, any device, no host sync."""

import torch
from torch import Tensor


def topk_torch(u: Tensor, k: int, maxima: Tensor | None = None, group: int = 0) -> Tensor:
    """See `topk`. The k-th magnitude, then everything above it and the first ties."""
    if k == 0:
        return torch.empty(0, dtype=torch.int32, device=u.device)
    magnitude = u.abs()
    bound = torch.topk(magnitude, k, sorted=False).values.amin()
    above = magnitude > bound
    tied = magnitude == bound
    chosen = above | (tied & (tied.cumsum(0) <= k - above.sum()))
    # One more place than k takes the writes of everything that was not chosen.
    place = torch.where(chosen, chosen.cumsum(0) - 1, k)
    out = torch.empty(k + 1, dtype=torch.int32, device=u.device)
    everyone = torch.arange(u.numel(), dtype=torch.int32, device=u.device)
    return out.scatter_(0, place, everyone)[:k]
