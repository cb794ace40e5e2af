"""gTop-k: k entries in all, the same everywhere, and what is cut stays with somebody."""

import pytest
import torch

import gradwire
from gradwire.exchange.sparse_sum import add_sparse, keep_largest, subtract_sparse


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
    torch.testing.assert_close(add_sparse(a, b).dense(), a.dense() + b.dense())
    torch.testing.assert_close(subtract_sparse(a, b).dense(), a.dense() - b.dense())
    assert int(subtract_sparse(a, a).values.count_nonzero()) == 0
    kept = keep_largest(add_sparse(a, b), 40)
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


def leaks(world, merge):
    """The ranks' leaked shares, what the law misses, and what was chosen, a row a rank."""
    cluster = gradwire.VirtualCluster(world, exchange="gtopk", density=0.05, merge=merge)
    g = gradients(world, 3)
    update = cluster.average(g)
    kept = sum(cluster.residual(rank) for rank in range(world))
    chosen = torch.stack([gradwire.compress(x, density=0.05).dense() for x in g])
    shares = [cluster.stats(rank).leaked for rank in range(world)]
    return shares, sum(g) - world * update - kept, chosen


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_as_published_it_leaks_and_says_how_much(world):
    """Only entries that several workers chose can come back by another branch."""
    shares, missing, chosen = leaks(world, "paper")
    missing[missing.abs() < 1e-5] = 0
    assert bool(missing.any()) == (world > 2)
    assert bool(((chosen != 0).sum(0)[missing != 0] > 1).all())
    # What is missing of a coordinate is the sum of some of the choices there.
    lost = _explained(missing, chosen)
    energies = [float(row.square().sum()) for row in chosen]
    reported = sum(s * e for s, e in zip(shares, energies, strict=True) if s is not None)
    if world == 3:  # rank 0 took rank 2 in, and counts for both
        assert shares[2] is None
        reported = shares[0] * (energies[0] + energies[2]) + shares[1] * energies[1]
    assert reported == pytest.approx(lost, rel=1e-3, abs=1e-9)
    assert all(s is None or s < 0.1 for s in shares)


def _explained(missing, chosen):
    """The energy of the choices that add up to what is missing, found by trying all subsets."""
    total = 0.0
    for at in missing.nonzero().view(-1).tolist():
        values = [float(v) for v in chosen[:, at] if v != 0]
        subsets = [
            [v for i, v in enumerate(values) if bits >> i & 1] for bits in range(1 << len(values))
        ]
        best = min(subsets, key=lambda s: abs(sum(s) - float(missing[at])))
        assert sum(best) == pytest.approx(float(missing[at]), rel=1e-4, abs=1e-5)
        total += sum(v * v for v in best)
    return total


def test_the_default_leaks_nothing():
    shares, missing, _ = leaks(8, "lossless")
    assert set(shares) == {None}
    assert float(missing.abs().max()) < 1e-5


def test_published_residual_keeps_what_is_not_in_the_result():
    cluster = gradwire.VirtualCluster(4, exchange="gtopk", density=0.05, merge="paper")
    g = gradients(4, 5)
    update = cluster.average(g)
    for rank, gradient in enumerate(g):
        mine = gradwire.compress(gradient, density=0.05).dense()
        gone = (mine != 0) & (update != 0)
        assert torch.equal(cluster.residual(rank), torch.where(gone, 0, gradient))


def test_an_unknown_merge():
    with pytest.raises(ValueError, match=r"unknown merge of gtopk 'papre'.* 'paper'"):
        gradwire.Config(exchange="gtopk", options={"merge": "papre"})
