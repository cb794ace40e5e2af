"""gTop-k: k entries in all, the same everywhere, and what is cut stays with somebody."""

import pytest
import torch

import gradwire
from gradwire.exchange.entries import add, keep, subtract


def gradients(world, seed, correlated=0.7):
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(2000, generator=generator)
    own = [torch.randn(2000, generator=generator) for _ in range(world)]
    return [correlated * shared + (1 - correlated) * g for g in own]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6, 7, 8])
def test_at_most_k_entries_are_updated(world):
    cluster = gradwire.VirtualCluster(world, exchange="gtopk", density=0.01)
    for seed in range(3):
        update = cluster.average(gradients(world, seed))
        assert 0 < int((update != 0).sum()) <= 20


@pytest.mark.parametrize("world", [2, 4, 8])
def test_close_to_the_largest_of_the_sum(world):
    """A merge in pairs is not the exact top-k of the sum, but overlaps it (0.78 to 0.95)."""
    g = gradients(world, 0)
    update = gradwire.VirtualCluster(world, exchange="gtopk", density=0.05).average(g)
    local = torch.stack([gradwire.compress(x, density=0.05).dense() for x in g]).sum(0)
    exact = set(gradwire.compress(local, density=0.05).indices.tolist())
    found = set(update.nonzero().view(-1).tolist())
    assert len(exact & found) / len(exact) > 0.75


def test_two_workers_find_it_exactly():
    g = gradients(2, 1)
    update = gradwire.VirtualCluster(2, exchange="gtopk", density=0.05).average(g)
    local = torch.stack([gradwire.compress(x, density=0.05).dense() for x in g]).sum(0)
    torch.testing.assert_close(update, gradwire.compress(local, density=0.05).dense() / 2)


def test_adding_sparse_vectors():
    a, b = (gradwire.compress(torch.randn(300), k=40) for _ in range(2))
    torch.testing.assert_close(add(a, b).dense(), a.dense() + b.dense())
    torch.testing.assert_close(subtract(a, b).dense(), a.dense() - b.dense())
    assert int(subtract(a, a).values.count_nonzero()) == 0
    kept = keep(add(a, b), 40)
    assert torch.equal(kept.dense(), gradwire.compress(a.dense() + b.dense(), k=40).dense())


def real(rank, world, values):
    state = gradwire.State(exchange="gtopk", values=values, density=0.01, dense_below=0)
    out = b""
    for seed in range(5):
        g = gradients(world, seed)[rank].clone()
        gradwire.average({"gradient": g}, state)
        out += g.numpy().tobytes()
    return out


@pytest.mark.parametrize(("world", "values"), [(2, "fp32"), (3, "fp32"), (4, "bf16")])
def test_virtual_workers_equal_real_ranks_bit_for_bit(ranks, world, values):
    cluster = gradwire.VirtualCluster(world, exchange="gtopk", values=values, density=0.01)
    out = b"".join(cluster.average(gradients(world, s)).numpy().tobytes() for s in range(5))
    assert set(ranks.run(world, real, world, values)) == {out}
