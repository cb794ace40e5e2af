"""The order of the examples, and each rank's share of each step."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gradwire.hashing import blake2b_seed
from gradwire.workbench.data.dataset import DataError


@dataclass(frozen=True)
class Shard:
    """One rank's share of `examples`, `batch` at a time.

    An epoch is one permutation of all examples, drawn from (seed, epoch). Each step takes the next
    world * batch examples, and rank r takes piece r. Every rank has the same number of full
    batches; the remaining examples are left out of that epoch. Nothing is remembered between steps,
    so an epoch can be entered at any step.
    """

    examples: int
    batch: int
    rank: int
    world: int
    seed: int

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise DataError(f"batch must be at least 1, got {self.batch}.")
        if self.steps < 1:
            most = self.examples // self.world
            raise DataError(
                f"batch {self.batch} x {self.world} workers is more than the {self.examples} "
                f"training examples. Use a batch of at most {most}, or fewer workers."
            )

    @property
    def steps(self) -> int:
        """Steps in an epoch, the same on every rank."""
        return self.examples // (self.batch * self.world)

    def order(self, epoch: int) -> Tensor:
        """Return the epoch's permutation, equal on every rank; do not change the tensor."""
        return _epoch_order(self.examples, blake2b_seed(self.seed, epoch))

    def batches(self, epoch: int, start: int = 0) -> Iterator[Tensor]:
        """Yield this rank's indices of each step of the epoch, from step `start` on."""
        order = self.order(epoch)
        for step in range(start, self.steps):
            first = (step * self.world + self.rank) * self.batch
            yield order[first : first + self.batch]


@lru_cache(maxsize=4)
def _epoch_order(examples: int, seed: int) -> Tensor:
    """Draw a permutation; cached, because all virtual workers ask for it at every step."""
    return torch.randperm(
        examples, dtype=torch.int64, generator=torch.Generator().manual_seed(seed)
    )
