"""MiCRO: equal parts that go round the workers, and a threshold that follows the count."""

import torch
from torch import Tensor

from gradwire.compress.method import Method
from gradwire.compress.parts.partition import (
    adapt_threshold,
    capacity_per_rank,
    next_part,
    select_in_part,
)
from gradwire.types import ALIGN, Memory, Scan, Sparse


def micro(u: Tensor, k: int, memory: Memory, scan: Scan | None = None) -> Sparse:
    """Equal parts that go round the workers, with one threshold; k entries in all.

    Yoon and Oh (2023): in step t worker p chooses |u| > theta in part (p + t) mod P. After the step
    theta is multiplied: by 1.005 if all workers chose more than 1.1 k, by 0.995 if at most k / 1.1.
    In between the factor is 1.00125 above k and 0.99875 below.
    Different from the released code:
    - theta starts as the k-th largest |u| of the worker. 1 / (2 sqrt(k)) knows nothing of the scale
      of u.
    - In the dead zone the test is > 1. The test > 0 never lowered theta.
    - While the count misses k by a quarter, theta moves half as much again at each step, up to 25
      %. At first the residual grows tenfold, which 0.5 % per step takes 460 steps to follow.
    - A message has room for twice an even share of k. The smallest entries are cut, and stay.
    - If no entry passes, no entry is sent. The released code sends one.
    """
    inside = None
    if memory.ranks > 1:
        part, blocks = next_part(memory, u.device), u.numel() // ALIGN
        low, high = part * blocks // memory.ranks, (part + 1) * blocks // memory.ranks
        block = torch.arange(blocks, dtype=torch.int64, device=u.device)
        inside = (block >= low) & (block < high)
    return select_in_part(u, k, inside, memory, scan)


def micro_learns(memory: Memory, agreed: Sparse, k: int) -> None:
    """Scale the threshold by the number of entries that all workers chose."""
    adapt_threshold(memory, agreed.count, k)


METHOD = Method(micro, exchange="union", capacity_per_rank=capacity_per_rank, learns=micro_learns)
