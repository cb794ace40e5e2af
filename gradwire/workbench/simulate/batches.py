"""Cut the batches of all workers at once, on the device of the data."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.hashing import blake2b_seed
from gradwire.workbench.data import Data, Dataset, Shard
from gradwire.workbench.train.task import Batch


class Batches:
    """The batches of all workers for one step, as tensors [P, n, ...].

    Row r holds the examples that worker r of a real run would see, augmented by the same random
    draws. Order and draws of an epoch move to the device when the epoch begins, so no step waits.
    """

    def __init__(self, data: Data, shards: Sequence[Shard], device: torch.device) -> None:
        self._data, self._shards, self._device = data, shards, device
        self._epoch = -1
        self._order = self._draws = torch.zeros(0, dtype=torch.int64)

    def __call__(self, epoch: int, offset: int) -> Batch:
        """Return the batches of step `offset` of an epoch."""
        if epoch != self._epoch:
            self._begin(epoch)
        indices = self._order[offset].flatten()
        if not isinstance(self._data, Dataset):
            # The seed has no effect, because text is not augmented.
            batch = self._data.training_batch(indices, seed=0)
        else:
            drawn = self._draws[offset].flatten(0, 1) if self._data.augment else None
            batch = self._data.cut_batch(indices, drawn)
        return [part.unflatten(0, self._order[offset].shape) for part in batch]

    def _begin(self, epoch: int) -> None:
        shard, shape = self._shards[0], (-1, len(self._shards), self._shards[0].batch)
        used = shard.steps * len(self._shards) * shard.batch
        self._order = shard.order(epoch)[:used].view(shape).to(self._device)
        if isinstance(self._data, Dataset) and self._data.augment:
            self._draws = self._draw(self._data, epoch).to(self._device)
        self._epoch = epoch

    def _draw(self, data: Dataset, epoch: int) -> Tensor:
        """Return the random draws of an epoch, [steps, P, n, 3]."""
        shard, ranks = self._shards[0], range(len(self._shards))
        seeds = [
            [blake2b_seed(shard.seed, epoch, step, r) for r in ranks] for step in range(shard.steps)
        ]
        drawn = [data.draw_crops(seed, shard.batch) for row in seeds for seed in row]
        stacked = torch.stack([part for part in drawn if part is not None])
        return stacked.unflatten(0, (shard.steps, len(ranks)))
