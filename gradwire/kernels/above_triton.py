"""above on CUDA: the exact selection of `capacity` entries, without those that do not pass."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.kernels.topk import select


def above_triton(
    u: Tensor, threshold: Tensor, capacity: int, maxima: Tensor | None = None, group: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """See `above`. Whatever passes is among the `capacity` largest, or these are all that is taken.

    Moves what `topk` does for `capacity` entries, and some 60 bytes for each of them.
    """
    size, room = u.numel(), min(capacity, u.numel())
    chosen, entries = select(u, room, maxima, group)
    passes = entries.abs().float() > threshold
    upto = passes.cumsum(0)
    # One more place than there is room takes the writes of everything that does not pass.
    place = torch.where(passes, upto - 1, capacity)
    indices = chosen.new_full((capacity + 1,), size).scatter_(0, place, chosen)
    values = entries.new_zeros(capacity + 1).scatter_(0, place, entries)
    count = pad(upto, (1, 0))[-1].to(torch.int32)
    return indices[:capacity], values[:capacity], count
