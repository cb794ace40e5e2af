"""ExDyna: MiCRO with parts that grow and shrink until all workers choose equally many entries."""

import torch
from torch import Tensor

from gradwire.compress.method import Method
from gradwire.compress.parts.partition import (
    adapt_threshold,
    capacity_per_rank,
    count_between,
    next_part,
    select_in_part,
)
from gradwire.types import ALIGN, Memory, Scan, Sparse

_BLOCKS = 1024
"""The number of blocks that u is cut into."""
_UNEVEN = 1.05
"""The factor between a part's count and an even share at which a block moves."""


def exdyna(u: Tensor, k: int, memory: Memory, scan: Scan | None = None) -> Sparse:
    """MiCRO with parts that change until all workers choose equally many entries.

    Yoon and Oh (2024): u is cut into 1024 blocks, and a part is a run of blocks. After each step,
    one block moves between two neighbouring parts if their counts are uneven. Uneven means: one
    chose more than 1.05 times an even share, and the other less than 1 / 1.05. A part keeps at
    least a quarter of an even share of blocks. Entries behind the last block belong to the last
    part. memory["starts"] holds the first block of each part, and the end. The counts of all parts
    come from the entries that all workers agreed on.
    Different from the released code: the differences of micro, and these:
    - Blocks are multiples of 64 entries, not of 32, and at least 64, so small bundles have fewer
      blocks.
    - All pairs of neighbours are judged at once.
    """
    inside = None
    if memory.ranks > 1:
        starts = _starts(memory, u)
        part = next_part(memory, u.device)
        row = torch.arange(u.numel() // ALIGN, dtype=torch.int64, device=u.device)
        block = row // _per_block(u.numel())
        low, high = starts.gather(0, torch.stack([part, part + 1])).unbind()
        inside = (block >= low) & ((block < high) | (part == memory.ranks - 1))
    return select_in_part(u, k, inside, memory, scan)


def exdyna_learns(memory: Memory, agreed: Sparse, k: int) -> None:
    """Scale the threshold, and move blocks, by the entries that all workers chose."""
    adapt_threshold(memory, agreed.count, k)
    if memory.ranks > 1:
        starts = memory["starts"]
        bounds = starts * _per_block(agreed.size) * ALIGN
        bounds[-1:].fill_(agreed.size)
        least = max(1, _blocks(agreed.size) // (4 * memory.ranks))
        starts.copy_(move_blocks(starts, count_between(agreed, bounds), least))


def move_blocks(starts: Tensor, counts: Tensor, least: int) -> Tensor:
    """Return the starts after one block has moved between each pair of uneven neighbours."""
    even, shares = counts.sum().float() / counts.numel(), counts.float()
    over, under = shares > _UNEVEN * even, shares * _UNEVEN < even
    # A part needs two spare blocks, because both neighbours may take one from it.
    gives = starts.diff() >= least + 2
    left = over[:-1] & under[1:] & gives[:-1]
    right = under[:-1] & over[1:] & gives[1:]
    result = starts.clone()
    result[1:-1] += right.to(starts.dtype) - left.to(starts.dtype)
    return result


def _starts(memory: Memory, u: Tensor) -> Tensor:
    """Return the remembered starts, or even ones for another number of workers."""
    if memory.get("starts", u).numel() != memory.ranks + 1:
        even = torch.arange(memory.ranks + 1, dtype=torch.int64, device=u.device)
        memory["starts"] = even * _blocks(u.numel()) // memory.ranks
    return memory["starts"]


def _per_block(size: int) -> int:
    """Return the number of ALIGN entries in a block."""
    return max(1, size // _BLOCKS // ALIGN)


def _blocks(size: int) -> int:
    """Return the number of blocks in `size` entries."""
    return min(_BLOCKS, size // (ALIGN * _per_block(size)))


METHOD = Method(exdyna, exchange="union", capacity_per_rank=capacity_per_rank, learns=exdyna_learns)
