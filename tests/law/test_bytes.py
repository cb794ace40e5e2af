"""What an exchange says it sends is what its group counted."""

import pytest
import torch

import gradwire
from gradwire.accumulate.schedule import entry_count
from gradwire.encode import Encoding
from gradwire.encode.format import STOCHASTIC
from gradwire.exchange import EXCHANGES
from gradwire.types import align
from tests.exchange.cases import Hand


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_a_cluster_counts_what_its_exchange_sends_and_what_dense_would(world):
    """Of every exchange: tests/exchange/test_every.py, which also counts rounds."""
    cluster = gradwire.VirtualCluster(world, density=0.01)
    cluster.average([torch.randn(3001) for _ in range(world)])
    k = entry_count(0.01, 3001)
    stats = cluster.stats()
    assert stats.bytes_sent == EXCHANGES["allgather"].bytes(world, align(3001), k, Encoding())
    assert stats.bytes_dense == 2 * (world - 1) * 4 * 3001 // world


ENCODED = [
    (exchange, values, indices)
    for exchange in ("allgather", "gtopk", "oktopk", "union", "owner", "hierarchical")
    for values in EXCHANGES[exchange].values
    for indices in ("int32", "packed", "local16", "bitmap", "auto")
]


@pytest.mark.parametrize(("exchange", "values", "indices"), ENCODED)
def test_every_encoding_is_counted(exchange, values, indices):
    """Bytes on the wire, padding included, are the formula's to the last one."""
    size = 70_016 if indices == "local16" else 3008
    for k in (1, 33):
        u = [torch.randn(size) for _ in range(3)]
        out = Hand(exchange, 3, values=values, indices=indices).step(u, k)
        assert out.sent == EXCHANGES[exchange].bytes(3, size, k, Encoding(values, indices))


@pytest.mark.parametrize(("method", "indices"), [("topk", "int32"), ("randk:shared", "common")])
def test_a_union_is_no_longer_than_the_vector_nor_common_indices_than_k(method, indices):
    for k in (33, 2000):
        u = [torch.randn(3008) for _ in range(3)]
        out = Hand("union", 3, method=method).step(u, k)
        assert out.sent == EXCHANGES["union"].bytes(3, 3008, k, Encoding("fp32", indices))


@pytest.mark.parametrize("values", STOCHASTIC)
def test_rounding_costs_no_bytes(values):
    plain, noisy = (
        gradwire.VirtualCluster(3, values=values, indices="packed", rounding=rounding, density=0.01)
        for rounding in ("nearest", "stochastic")
    )
    g = [torch.randn(3001) for _ in range(3)]
    assert not torch.equal(plain.average(g), noisy.average(g))
    assert plain.stats().bytes_sent == noisy.stats().bytes_sent


def real(rank):
    state = gradwire.State(density=0.01, dense_below=0)
    gradwire.average([torch.randn(3001, generator=torch.Generator().manual_seed(rank))], state)
    return state.stats().bytes_sent


def test_real_ranks_count_the_same(ranks):
    cluster = gradwire.VirtualCluster(3, density=0.01)
    cluster.average([torch.randn(3001) for _ in range(3)])
    assert ranks.run(3, real) == [cluster.stats().bytes_sent] * 3


def test_a_shared_seed_sends_no_indices():
    shared = gradwire.VirtualCluster(4, method="randk", density=0.1, shared=True)
    own = gradwire.VirtualCluster(4, method="randk", density=0.1)
    g = [torch.randn(1000) for _ in range(4)]
    union = [int((c.average(g) != 0).sum()) for c in (shared, own)]
    assert shared.stats().bytes_sent == 3 * (32 + 4 * 100 + 0)
    assert own.stats().bytes_sent == 3 * (32 + 8 * 100)
    assert union[0] == 100
    assert union[1] > 300


def test_bytes_decide_by_what_really_travels():
    """At density 0.3 four ranks send more than dense with indices, and less without them."""
    g = [torch.randn(1000) for _ in range(4)]
    for shared, dense in ((True, {}), (False, {"bytes": 1})):
        cluster = gradwire.VirtualCluster(4, method="randk", density=0.3, shared=shared)
        cluster.average(g)
        assert cluster.stats().dense == dense
