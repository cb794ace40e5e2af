"""The union: everyone's values where anyone chose."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire
from gradwire.kernels.join import distinct_indices


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    size=st.integers(1, 200),
    lists=st.lists(st.sets(st.integers(0, 199), max_size=30), min_size=1, max_size=5),
    padding=st.integers(0, 5),
)
def test_merge_is_the_set_union_with_padding(size, lists, padding):
    lists = [sorted(i for i in chosen if i < size) for chosen in lists]
    indices = [i for chosen in lists for i in chosen] + [size] * padding
    if not indices:
        return
    out = distinct_indices(torch.tensor(indices, dtype=torch.int32), size)
    distinct = sorted(set(indices) - {size})
    assert out.dtype == torch.int32
    assert out.tolist() == distinct + [size] * (min(size, len(indices)) - len(distinct))


def test_every_worker_delivers_on_the_whole_union():
    g = [torch.randn(1000) for _ in range(4)]
    cluster = gradwire.VirtualCluster(4, exchange="union", density=0.02)
    update = cluster.average(g)
    chosen = torch.zeros(1000, dtype=torch.bool)
    for gradient in g:
        chosen[gradwire.compress(gradient, density=0.02).indices.long()] = True
    mean = torch.stack(g).mean(0)
    torch.testing.assert_close(update, torch.where(chosen, mean, 0))
    for rank in range(4):
        assert torch.equal(cluster.residual(rank), torch.where(chosen, 0, g[rank]))
    assert cluster.stats().achieved_density == int(chosen.sum()) / 1000


def test_common_indices_need_no_lists():
    cluster = gradwire.VirtualCluster(4, method="randk", shared=True, exchange="union", density=0.1)
    cluster.average([torch.randn(1000) for _ in range(4)])
    # Headers of 32 bytes, and 2 (P - 1) / P of 100 values.
    assert cluster.stats().bytes_sent == 3 * 32 + 2 * 3 * 25 * 4


def real(rank, values):
    state = gradwire.State(exchange="union", values=values, density=0.05, dense_below=0)
    out = b""
    for step in range(10):
        g = torch.randn(977, generator=torch.Generator().manual_seed(100 * step + rank))
        gradwire.average({"gradient": g}, state)
        out += g.numpy().tobytes()
    return out


@pytest.mark.parametrize("values", ["fp32", "bf16"])
def test_virtual_workers_equal_real_ranks_bit_for_bit(ranks, values):
    cluster = gradwire.VirtualCluster(3, exchange="union", values=values, density=0.05)
    out = b""
    for step in range(10):
        seeds = [torch.Generator().manual_seed(100 * step + rank) for rank in range(3)]
        out += cluster.average([torch.randn(977, generator=s) for s in seeds]).numpy().tobytes()
    assert set(ranks.run(3, real, values)) == {out}
