"""Momentum correction, masking and clipping: with every method and exchange, nothing lost."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire
from gradwire.accumulate.momentum import clip_factor
from gradwire.accumulate.schedule import entry_count
from gradwire.exchange import EXCHANGES
from tests.exchange.cases import SKETCHES, options, owned_after
from tests.law.cases import KINDS, NOTHING, gradients, violation
from tests.law.test_law import CASES, DTYPES

PAIRS = sorted({(method, exchange) for method, exchange, _ in CASES})


def momenta(cluster):
    """What every worker's momentum is now."""
    states = cluster._states
    return [s.bundles[0].momentum(s.was_skipped())[: cluster._size] for s in states]


def corrected(g, m, e, factor, nesterov):
    """(m, u) by the formulas."""
    if nesterov:
        m = (m + g) * factor
        return m, e + (m + g)
    m = m * factor + g
    return m, e + m


@pytest.mark.parametrize(("method", "exchange"), PAIRS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    world=st.sampled_from([1, 2, 3, 4, 5, 8]),
    size=st.integers(1, 700),
    density=st.sampled_from([0.01, 0.1, 1.0]),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    nesterov=st.booleans(),
    masking=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_law(method, exchange, world, size, density, kind, dtype, nesterov, masking, seed):
    generator = torch.Generator().manual_seed(seed)
    cluster = gradwire.VirtualCluster(
        world, method=method, exchange=exchange, density=density, momentum=0.9,
        nesterov=nesterov, masking=masking, **options(exchange, size, entry_count(density, size)),
    )  # fmt: skip
    e = m = [torch.zeros(size)] * world
    before_step = NOTHING
    for _ in range(4):
        g = gradients(kind, world, size, dtype, generator)
        update = cluster.average(g)
        new = [cluster.residual(rank) for rank in range(world)]
        pairs = [corrected(*x, 0.9, nesterov) for x in zip(g, m, e, strict=True)]
        after = owned_after(cluster._states, size)
        assert violation([u for _, u in pairs], update, new, before_step, after) <= 4
        m, e, before_step = momenta(cluster), new, after
        for now, (before, _) in zip(m, pairs, strict=True):
            assert bool(((now == before) | (now == 0)).all())
            assert masking or torch.equal(now, before)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("fields", [{"method": "dense"}, {"density": 1.0}, {"dense_below": 10**6}])
def test_sent_whole_it_is_sgd_with_momentum(fields, nesterov):
    cluster = gradwire.VirtualCluster(3, momentum=0.8, nesterov=nesterov, **fields)
    ours, theirs = torch.zeros(200), torch.zeros(200, requires_grad=True)
    sgd = torch.optim.SGD([theirs], lr=0.1, momentum=0.8, nesterov=nesterov)
    for _ in range(10):
        g = [torch.randn(200) for _ in range(3)]
        ours -= 0.1 * cluster.average(g)
        theirs.grad = torch.stack(g).mean(0)
        sgd.step()
    torch.testing.assert_close(ours, theirs.detach())
    assert cluster.stats().residual_norm == 0


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_momentum_ends_where_something_was_delivered(exchange):
    cluster = gradwire.VirtualCluster(
        4, density=0.02, exchange=exchange, momentum=0.9, **options(exchange, 1000, 20)
    )
    torch.manual_seed(0)
    cluster.average([torch.randn(1000) for _ in range(4)])
    old, kept = momenta(cluster), [cluster.residual(rank) for rank in range(4)]
    g = [torch.randn(1000) for _ in range(4)]
    update = cluster.average(g)
    for rank, now in enumerate(momenta(cluster)):
        m, u = corrected(g[rank], old[rank], kept[rank], 0.9, False)
        gone = update != 0
        if exchange in ("oktopk", "owner", "hierarchical", *SKETCHES):
            gone &= cluster.residual(rank) != u
        elif exchange != "union":
            gone &= gradwire.compress(u, density=0.02).dense() != 0
        if exchange == "gtopk":
            # What was cut in one pair may come back by another: then it stays where it was cut.
            gone &= cluster.residual(rank) == 0
        assert torch.equal(now, torch.where(gone, 0, m))
        assert int(gone.sum()) >= (1 if exchange in ("gtopk", "oktopk", "owner") else 20)


def test_flush_keeps_the_momentum():
    cluster = gradwire.VirtualCluster(2, density=0.01, momentum=0.9)
    g = [torch.randn(500) for _ in range(2)]
    cluster.average(g)
    before = momenta(cluster)
    cluster.flush()
    cluster.average([torch.zeros(500)] * 2)
    assert cluster.stats().residual_norm == 0
    assert all(torch.equal(a * 0.9, b) for a, b in zip(before, momenta(cluster), strict=True))


def test_a_step_that_did_not_happen_masks_nothing():
    cluster = gradwire.VirtualCluster(3, density=0.05, momentum=0.9)
    first, second = ([torch.randn(400) for _ in range(3)] for _ in range(2))
    cluster.average(first)
    assert float(momenta(cluster)[0].eq(0).sum()) == 20
    cluster.skip_step()
    assert torch.equal(momenta(cluster)[0], first[0])
    assert torch.equal(cluster.residual(0), first[0])
    update = cluster.average(second)
    m = [a * 0.9 + b for a, b in zip(first, second, strict=True)]
    u = [a + b for a, b in zip(first, m, strict=True)]
    assert violation(u, update, [cluster.residual(r) for r in range(3)]) <= 4


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_does_not_get_in(bad, clip):
    cluster = gradwire.VirtualCluster(2, density=0.1, momentum=0.5, clip=clip)
    g = [torch.ones(100), torch.ones(100)]
    g[1][7] = bad
    assert not torch.isfinite(cluster.average(g)).any()
    kept = cluster.residual(1)
    expected = torch.ones(100) if not clip else torch.full((100,), 1 / math.sqrt(2 * 99))
    expected[7] = 0
    torch.testing.assert_close(kept, expected)
    torch.testing.assert_close(momenta(cluster)[1], expected)


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_clipping_bounds_the_norm_of_a_workers_gradient(world, dtype, momentum):
    cluster = gradwire.VirtualCluster(world, density=0.1, clip=3.0, momentum=momentum)
    g = [torch.randn(1000).to(dtype) for _ in range(world)]
    g[0] = (g[0] / 100).to(dtype)
    update = cluster.average(g)
    bound = 3 / math.sqrt(world)
    clipped = [x.float() * min(1, bound / float(x.double().norm())) for x in g]
    assert torch.equal(clipped[0], g[0].float())
    kept = [cluster.residual(rank) for rank in range(world)]
    assert violation(clipped, update, kept) <= 8
    assert [cluster.stats(r).clipped for r in range(world)] == [0] + [1] * (world - 1)


def test_clipping_a_gradient_whose_squares_overflow():
    cluster = gradwire.VirtualCluster(1, density=1.0, clip=1.0)
    update = cluster.average([torch.full((100,), 1e30)])
    torch.testing.assert_close(update, torch.full((100,), 0.1))


def test_clipping_looks_at_the_gradient_without_its_scale():
    pieces = [(0, torch.full((3,), 1000.0)), (64, torch.full((1,), 1000.0).half())]
    for clip, factor in ((1.0, 0.0005), (3.0, 0.001)):
        found, clipped = clip_factor(pieces, clip, 1, torch.tensor(0.001))
        assert float(found) == pytest.approx(factor)
        assert bool(clipped) == (clip == 1.0)
        assert found.dtype == torch.float32


def test_memory_and_names():
    plain, heavy = (gradwire.VirtualCluster(1, momentum=m) for m in (0.0, 0.9))
    for cluster in (plain, heavy):
        cluster.average([torch.randn(6400)])
    assert heavy.stats().memory_bytes - plain.stats().memory_bytes == 4 * 6401
    assert "momentum 0.9" in repr(heavy._states[0])
    assert "momentum" not in repr(plain._states[0])
