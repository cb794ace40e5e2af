"""The reference of adapt: plain torch, any device, no host sync."""

from torch import Tensor

EVERY = 5
FEW = 0.8
MANY = 1.2


def adapt_torch(
    stages: Tensor, calls: Tensor, ratios: Tensor, count: Tensor, k: int, most: int
) -> None:
    """See `adapt`."""
    ratios.add_(count, alpha=1 / max(1, k))
    calls.add_(1)
    due = calls % EVERY == 0
    change = (ratios < FEW * EVERY).long() - (ratios > MANY * EVERY).long()
    stages.add_(change * due).clamp_(1, most)
    ratios.mul_(~due)
