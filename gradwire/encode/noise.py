"""Random bits for rounding, by counting: entry i of step n has the same ones after every resume."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.hashing import GOLDEN, lowbias32, lowbias32_int
from gradwire.types import Memory


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
        return lowbias32_int(lowbias32_int(self.bundle + 1) + self.rank)


def next_noise(memory: Memory, device: torch.device) -> Noise:
    """The noise of this step; memory["roundings"] counts them and is checkpointed."""
    if "roundings" not in memory:
        memory["roundings"] = torch.zeros((), dtype=torch.int64, device=device)
    return Noise(memory.bundle, memory.rank, memory["roundings"].add_(1))


def random_words(noise: Noise, count: int) -> Tensor:
    """Return `count` numbers of 32 bits, int64.

    Number i is h(i x golden ratio + h(key + step)), where h is lowbias32.
    """
    order = torch.arange(count, dtype=torch.int64, device=noise.step.device)
    return lowbias32(order * GOLDEN + lowbias32(noise.step + noise.key))
