"""The law: mean of u = update + mean of the new residuals. First test of everything."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire
from gradwire.accumulate.schedule import entry_count
from gradwire.compress import METHODS
from gradwire.exchange import EXCHANGES
from tests.exchange.cases import allowed, options, owned_after
from tests.law.cases import KINDS, NOTHING, gradients, violation

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FEW = [("allgather", "fp32"), ("allgather", "int4"), ("union", "fp32"), ("gtopk", "fp32")]
"""Exchanges that see how many entries were chosen: enough for every method but topk."""
CASES = [
    (method, exchange, values)
    for method, exchange, values in allowed()
    if method == "topk" or METHODS[method].exchange or (exchange, values) in FEW
]
"""Random-k and every exchange meet in tests/exchange/test_every.py."""


@pytest.mark.parametrize(("method", "exchange", "values"), CASES)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    world=st.sampled_from([1, 2, 3, 4, 5, 8]),
    size=st.integers(1, 700),
    density=st.sampled_from([0.001, 0.01, 0.1, 0.5, 1.0]),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    indices=st.sampled_from(["int32", "packed", "auto"]),
    seed=st.integers(0, 10**6),
)
def test_law(method, exchange, values, world, size, density, kind, dtype, indices, seed):
    generator = torch.Generator().manual_seed(seed)
    cluster = gradwire.VirtualCluster(
        world,
        method=method,
        exchange=exchange,
        values=values,
        indices=indices,
        density=density,
        options=options(exchange, size, entry_count(density, size)),
    )
    old, before = [torch.zeros(size) for _ in range(world)], NOTHING
    for _ in range(3):
        g = gradients(kind, world, size, dtype, generator)
        update = cluster.average(g)
        new = [cluster.residual(rank) for rank in range(world)]
        assert update.dtype == dtype
        u = [a.float() + b for a, b in zip(g, old, strict=True)]
        after = owned_after(cluster._states, size)
        assert violation(u, update, new, before, after) <= 4
        old, before = new, after


def test_what_was_sent_is_exactly_gone():
    cluster = gradwire.VirtualCluster(3, density=0.1)
    g = [torch.randn(500) for _ in range(3)]
    cluster.average(g)
    for rank in range(3):
        sent = gradwire.compress(g[rank], density=0.1)
        kept = cluster.residual(rank)
        assert torch.equal(kept[sent.indices.long()], torch.zeros(50))
        assert torch.equal(kept + sent.dense(), g[rank])


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_worker_that_is_not_finite_stops_the_step_everywhere(exchange, bad):
    cluster = gradwire.VirtualCluster(
        3, exchange=exchange, density=0.1, options=options(exchange, 300, 30)
    )
    first = [torch.randn(300) for _ in range(3)]
    sent = cluster.average(first)
    kept = [cluster.residual(rank) for rank in range(3)]
    second = [torch.randn(300) for _ in range(3)]
    second[1][7] = bad
    assert not torch.isfinite(cluster.average(second)).any()
    second[1][7] = 0  # the entry itself is dropped, everything else stays
    for rank in range(3):
        assert torch.equal(cluster.residual(rank), kept[rank] + second[rank])
    third = [torch.randn(300) for _ in range(3)]
    update = cluster.average(third)
    total = torch.stack([*first, *second, *third]).double().sum(0)
    new = sum(cluster.residual(rank).double() for rank in range(3))
    new += 3 * owned_after(cluster._states, 300)
    torch.testing.assert_close(3 * (sent + update).double() + new, total, rtol=0, atol=1e-5)
    assert cluster.stats().skipped == 1


def test_of_an_fp16_mean_the_part_that_overflows_waits():
    cluster = gradwire.VirtualCluster(2, density=0.5, method="topk/dense")
    large = torch.full((100,), 60000.0).half()
    updates = [cluster.average([large, large]) for _ in range(4)]
    most = torch.finfo(torch.float16).max
    assert float(updates[-1].max()) == most
    assert cluster.stats().skipped == 0
    total = torch.stack(updates).double().sum(0) + cluster.residual(0).double()
    assert torch.equal(total, torch.full((100,), 240000.0, dtype=torch.float64))


def test_flush_and_skip_step():
    cluster = gradwire.VirtualCluster(2, density=0.1)
    first, second = ([torch.randn(200) for _ in range(2)] for _ in range(2))
    update = cluster.average(first)
    kept = [cluster.residual(r) for r in range(2)]
    cluster.skip_step()
    assert torch.equal(cluster.residual(0), first[0])
    cluster.flush()
    update = cluster.average(second)
    assert float(cluster.residual(0).norm()) == 0
    mean = torch.stack([a + b for a, b in zip(first, second, strict=True)]).mean(0)
    torch.testing.assert_close(update, mean)
    cluster.skip_step()
    assert torch.equal(cluster.residual(1), first[1] + second[1])
    assert not torch.equal(kept[0], first[0])
