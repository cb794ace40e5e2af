"""Random bits for rounding, by counting: entry i of step n has the same ones after every resume."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.types import Memory

WORD = 0xFFFFFFFF
GOLDEN, FIRST, SECOND = 0x9E3779B9, 0x7FEB352D, 0x846CA68B


@dataclass(frozen=True)
class Noise:
    """A stream of random words: one for every (bundle, rank) is `key`, `step` counts on the device.

    `step` is a 0-d int64 tensor, so that a captured graph does not repeat itself.
    """

    bundle: int
    rank: int
    step: Tensor

    @property
    def key(self) -> int:
        return mix_int(mix_int(self.bundle + 1) + self.rank)


def next_noise(memory: Memory, device: torch.device) -> Noise:
    """The noise of this step; memory["roundings"] counts them and is checkpointed."""
    if "roundings" not in memory:
        memory["roundings"] = torch.zeros((), dtype=torch.int64, device=device)
    return Noise(memory.bundle, memory.rank, memory["roundings"].add_(1))


def random_words(noise: Noise, count: int) -> Tensor:
    """`count` numbers of 32 bits, int64: number i is mix(i x golden ratio + mix(key + step))."""
    order = torch.arange(count, dtype=torch.int64, device=noise.step.device)
    return _mix(order * GOLDEN + _mix(noise.step + noise.key))


def _mix(x: Tensor) -> Tensor:
    """A 32-bit finaliser (Wellons' lowbias32) on the low words of int64 tensors."""
    x = x & WORD
    x = ((x ^ (x >> 16)) * FIRST) & WORD
    x = ((x ^ (x >> 15)) * SECOND) & WORD
    return x ^ (x >> 16)


def mix_int(x: int) -> int:
    """`_mix` without touching a device."""
    x &= WORD
    x = ((x ^ (x >> 16)) * FIRST) & WORD
    x = ((x ^ (x >> 15)) * SECOND) & WORD
    return x ^ (x >> 16)
