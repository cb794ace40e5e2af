"""ExDyna: MiCRO with parts that grow and shrink until all workers choose as much."""

import torch
from torch import Tensor

from gradwire.compress.parts.partition import between, follow, passing, turn
from gradwire.types import ALIGN, Memory, Scan, Sparse

BLOCKS = 1024
UNEVEN = 1.05
"""How far from an even share a part may be before a block moves."""


def exdyna(u: Tensor, k: int, memory: Memory, scan: Scan | None = None) -> Sparse:
    """As micro, with parts that change until all choose as much.

    Yoon and Oh (2024): u is cut into 1024 blocks, a part is a run of them. After each step, where
    of two neighbouring parts one chose more than 1.05 times an even share and the other less than
    1 / 1.05, one block moves across; a part keeps at least a quarter of an even share of blocks.
    What is left over belongs to the last part. memory["starts"] holds the first block of each part
    and the end; the counts of all parts come from the entries that all workers agreed on.
    Different from the released code: as in micro; blocks are multiples of 64 entries, not 32, and
    of 64 at least, so that small bundles have fewer; all pairs are judged at once.
    """
    inside = None
    if memory.ranks > 1:
        starts = _starts(memory, u)
        mine = turn(memory, u.device)
        place = torch.arange(u.numel() // ALIGN, dtype=torch.int64, device=u.device)
        block = place // _per_block(u.numel())
        low, high = starts.gather(0, torch.stack([mine, mine + 1])).unbind()
        inside = (block >= low) & ((block < high) | (mine == memory.ranks - 1))
    return passing(u, k, inside, memory, scan)


def exdyna_learns(memory: Memory, agreed: Sparse, k: int) -> None:
    """Scales the threshold, and moves blocks, by what all workers chose."""
    follow(memory, agreed.count, k)
    if memory.ranks > 1:
        starts = memory["starts"]
        bounds = starts * _per_block(agreed.size) * ALIGN
        bounds[-1:].fill_(agreed.size)
        least = max(1, _blocks(agreed.size) // (4 * memory.ranks))
        starts.copy_(moved(starts, between(agreed, bounds), least))


def moved(starts: Tensor, counts: Tensor, least: int) -> Tensor:
    """The starts after one block has moved wherever two neighbours are uneven."""
    even, shares = counts.sum().float() / counts.numel(), counts.float()
    over, under = shares > UNEVEN * even, shares * UNEVEN < even
    # Both neighbours may take a block of the same part.
    gives = starts.diff() >= least + 2
    left = over[:-1] & under[1:] & gives[:-1]
    right = under[:-1] & over[1:] & gives[1:]
    out = starts.clone()
    out[1:-1] += right.to(starts.dtype) - left.to(starts.dtype)
    return out


def _starts(memory: Memory, u: Tensor) -> Tensor:
    """As remembered; made anew for another number of workers."""
    if memory.get("starts", u).numel() != memory.ranks + 1:
        even = torch.arange(memory.ranks + 1, dtype=torch.int64, device=u.device)
        memory["starts"] = even * _blocks(u.numel()) // memory.ranks
    return memory["starts"]


def _per_block(size: int) -> int:
    """How often ALIGN goes into a block."""
    return max(1, size // BLOCKS // ALIGN)


def _blocks(size: int) -> int:
    return min(BLOCKS, size // (ALIGN * _per_block(size)))
