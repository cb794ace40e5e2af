"""Random bits for stochastic rounding, from a counter.

Entry i of step n has the same bits in every run, also after a resume.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.hashing import GOLDEN, lowbias32, lowbias32_int
from gradwire.types import Memory


@dataclass(frozen=True)
class Noise:
    """A stream of random words for one step of one (bundle, rank).

    step: 0-d int64 on the device. A captured graph that read a number would repeat the same bits.
    """

    bundle: int
    rank: int
    step: Tensor

    @property
    def key(self) -> int:
        return lowbias32_int(lowbias32_int(self.bundle + 1) + self.rank)


def next_noise(memory: Memory, device: torch.device) -> Noise:
    """Return the noise of this step.

    `memory["roundings"]` counts the steps that rounded. It is part of a checkpoint.
    """
    if "roundings" not in memory:
        memory["roundings"] = torch.zeros((), dtype=torch.int64, device=device)
    return Noise(memory.bundle, memory.rank, memory["roundings"].add_(1))


def random_words(noise: Noise, count: int) -> Tensor:
    """Return `count` numbers of 32 bits, int64.

    Number i is h(i x golden ratio + h(key + step)), where h is lowbias32.
    """
    order = torch.arange(count, dtype=torch.int64, device=noise.step.device)
    return lowbias32(order * GOLDEN + lowbias32(noise.step + noise.key))
