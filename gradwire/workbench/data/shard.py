"""Which examples each rank sees, and when."""

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

    An epoch is one permutation of all examples, drawn from (seed, epoch). Step s takes the next
    world * batch of them and rank r the r-th piece, so every rank has the same number of full
    batches; the rest of the permutation is left out of that epoch. Nothing is remembered: an epoch
    can be entered at any step.
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
        """The epoch's permutation of all examples, the same on every rank; not to be changed."""
        return _order(self.examples, blake2b_seed(self.seed, epoch))

    def batches(self, epoch: int, start: int = 0) -> Iterator[Tensor]:
        """This rank's indices for step `start` and each later step of the epoch."""
        order = self.order(epoch)
        for step in range(start, self.steps):
            first = (step * self.world + self.rank) * self.batch
            yield order[first : first + self.batch]


@lru_cache(maxsize=4)
def _order(examples: int, seed: int) -> Tensor:
    """Kept, because all virtual workers ask for the same one at every step."""
    return torch.randperm(
        examples, dtype=torch.int64, generator=torch.Generator().manual_seed(seed)
    )
