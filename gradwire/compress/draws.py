"""Random numbers of a method, made on the device from a counter that checkpoints keep."""

import torch
from torch import Tensor

from gradwire.hashing import hash_words, splitmix64_golden
from gradwire.types import Memory

_MASK = 2**62 - 1


def draw_counter(memory: Memory, device: torch.device) -> Tensor:
    """Return memory["draws"], the number of draws so far (0-d int64)."""
    if "draws" not in memory:
        memory["draws"] = torch.zeros((), dtype=torch.int64, device=device)
    return memory["draws"]


def next_number(memory: Memory, device: torch.device) -> Tensor:
    """Return a random number in 0 .. 2^62 - 1 (0-d int64), and count the draw.

    Draw n of a bundle and rank is the same on every machine and after every resume.
    """
    draws = draw_counter(memory, device)
    number = splitmix64_golden(draws + hash_words(memory.bundle, memory.rank + 1)) & _MASK
    draws.add_(1)
    return number
