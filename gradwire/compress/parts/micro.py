"""MiCRO: equal parts that go round, and a threshold that follows the count."""

import torch
from torch import Tensor

from gradwire.compress.parts.partition import follow, passing, turn
from gradwire.types import ALIGN, Memory, Scan, Sparse


def micro(u: Tensor, k: int, memory: Memory, scan: Scan | None = None) -> Sparse:
    """Equal parts that go round the workers, one threshold; k in all.

    Yoon and Oh (2023): in step t worker p chooses |u| > theta in part (p + t) mod P; then
    theta *= 1.005 if all chose more than 1.1 k, 0.995 if at most k / 1.1, in between 1.00125 above
    k and 0.99875 below. Different from the released code:
    - theta starts as the k-th largest |u| of the worker, not as 1 / (2 sqrt(k)), which knows
      nothing of the scale of u;
    - in the dead zone it tests > 1, not > 0, which never lowered theta;
    - while the count misses k by a quarter, theta moves half as much again each step, up to 25 %:
      at first the residual grows tenfold, which 0.5 % a step takes 460 steps to follow;
    - a message has room for twice an even share of k; what is cut is the smallest, and stays;
    - where nothing passes nothing is sent, not one entry.
    """
    inside = None
    if memory.ranks > 1:
        mine, blocks = turn(memory, u.device), u.numel() // ALIGN
        low, high = mine * blocks // memory.ranks, (mine + 1) * blocks // memory.ranks
        block = torch.arange(blocks, dtype=torch.int64, device=u.device)
        inside = (block >= low) & (block < high)
    return passing(u, k, inside, memory, scan)


def micro_learns(memory: Memory, agreed: Sparse, k: int) -> None:
    """Scales the threshold by what all workers chose."""
    follow(memory, agreed.count, k)
