import pytest
import torch

from gradwire.hashing import blake2b_seed
from gradwire.workbench import data
from gradwire.workbench.data import Dataset, Shard
from gradwire.workbench.simulate.batches import Batches

WORLD, BATCH, SEED = 3, 4, 7


def pictures(augment):
    images = torch.randint(256, (50, 3, 8, 8), dtype=torch.uint8)
    labels = torch.arange(50)
    return Dataset("x", images, labels, images, labels, (0.5,) * 3, (0.2,) * 3, augment)


def words():
    return data.load_dataset("phrases", None, (6,))


@pytest.mark.parametrize("make", [lambda: pictures(True), lambda: pictures(False), words])
def test_a_row_is_what_the_worker_alone_would_cut(make):
    found = make()
    shards = [Shard(found.examples, BATCH, rank, WORLD, SEED) for rank in range(WORLD)]
    batches = Batches(found, shards, torch.device("cpu"))
    for epoch, offset in ((0, 0), (0, 1), (1, 0), (0, 1)):
        together = batches(epoch, offset)
        for rank, shard in enumerate(shards):
            indices = next(shard.batches(epoch, offset))
            alone = found.training_batch(indices, blake2b_seed(SEED, epoch, offset, rank))
            assert all(torch.equal(a[rank], b) for a, b in zip(together, alone, strict=True))
