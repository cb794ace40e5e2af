import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.hashing import blake2b_seed
from gradwire.workbench.data import DataError, Shard

sizes = st.tuples(st.integers(1, 200), st.integers(1, 9), st.integers(1, 6)).filter(
    lambda t: t[0] >= t[1] * t[2]
)


@given(sizes, st.integers(0, 5))
def test_ranks_have_equal_steps_and_no_example_twice(size, epoch):
    examples, batch, world = size
    shards = [Shard(examples, batch, rank, world, seed=3) for rank in range(world)]
    seen = [list(shard.batches(epoch)) for shard in shards]
    assert {len(batches) for batches in seen} == {examples // (batch * world)}
    everything = torch.cat([indices for batches in seen for indices in batches])
    assert len(everything.unique()) == len(everything) == shards[0].steps * batch * world
    assert everything.min() >= 0
    assert everything.max() < examples


@given(sizes, st.integers(0, 50))
def test_an_epoch_can_be_entered_at_any_step(size, start):
    examples, batch, world = size
    shard = Shard(examples, batch, world - 1, world, seed=1)
    remaining = list(shard.batches(2))[start:]
    entered = list(shard.batches(2, start))
    assert len(remaining) == len(entered)
    assert all(torch.equal(a, b) for a, b in zip(remaining, entered, strict=True))


def test_seed_and_epoch_decide_the_order():
    def order(seed, epoch):
        return Shard(100, 10, 0, 2, seed).order(epoch).tolist()

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_the_order_does_not_depend_on_the_number_of_workers():
    one, four = Shard(64, 8, 0, 1, seed=5), [Shard(64, 2, r, 4, seed=5) for r in range(4)]
    joined = [torch.cat(parts) for parts in zip(*(s.batches(1) for s in four), strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(one.batches(1), joined, strict=True))


def test_drawing_an_order_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    Shard(10, 1, 0, 1, seed=0).order(0)
    assert torch.equal(torch.rand(1), expected)


def test_too_large_a_batch_names_the_largest():
    with pytest.raises(DataError, match=r"batch 30 x 4 workers.*100 training.*at most 25"):
        Shard(100, 30, 0, 4, seed=0)


def test_mixing_depends_on_the_parts_and_their_order():
    assert blake2b_seed(1, 2) == blake2b_seed(1, 2)
    assert (
        len({blake2b_seed(1, 2), blake2b_seed(2, 1), blake2b_seed(12), blake2b_seed(1, 2, 0)}) == 4
    )
    assert 0 <= blake2b_seed(7) < 2**63
