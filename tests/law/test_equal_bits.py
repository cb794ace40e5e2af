"""Every worker computes the same bits, virtual or real."""

import pytest
import torch

import gradwire
from gradwire.compress import METHODS
from tests.exchange.cases import allowed, options
from tests.law.cases import gradients

CASES = [case for case in allowed() if case[0] not in ("topk", "randk")]
"""The others are compared in tests/exchange/test_every.py, where P and sizes vary."""


def test_no_method_is_left_out():
    assert {method for method, _, _ in CASES} == METHODS.keys() - {"topk", "randk"}


@pytest.mark.parametrize(("method", "exchange", "values"), CASES)
def test_every_worker_computes_the_same_bits(method, exchange, values):
    cluster = gradwire.VirtualCluster(
        5,
        method=method,
        exchange=exchange,
        values=values,
        density=0.05,
        options=options(exchange, 997, 50),
    )
    generator = torch.Generator().manual_seed(0)
    cluster.average(gradients("heavy", 5, 997, torch.float32, generator))
    g = gradients("heavy", 5, 997, torch.float32, generator)

    def work(rank):
        state = cluster._states[rank]
        state.begin()
        return state.process(state.bundles[0], [g[rank]]).numpy().tobytes()

    assert len(set(cluster._ranks.run(work))) == 1


def real(rank, method, exchange):
    import torch.distributed as dist

    state = gradwire.State(method=method, exchange=exchange, density=0.05, dense_below=0)
    out = b""
    for step in range(20):
        g = torch.randn(977, generator=torch.Generator().manual_seed(100 * step + rank))
        gradwire.average({"gradient": g}, state)
        out += g.numpy().tobytes()
    assert dist.get_world_size() == state.stats().world_size
    return out


@pytest.mark.parametrize("method", ["topk", "randk"])
def test_four_virtual_workers_equal_four_real_ranks_bit_for_bit(ranks, method):
    cluster = gradwire.VirtualCluster(4, method=method, exchange="allgather", density=0.05)
    out = b""
    for step in range(20):
        seeds = [torch.Generator().manual_seed(100 * step + rank) for rank in range(4)]
        out += cluster.average([torch.randn(977, generator=s) for s in seeds]).numpy().tobytes()
    assert set(ranks.run(4, real, method, "allgather")) == {out}
