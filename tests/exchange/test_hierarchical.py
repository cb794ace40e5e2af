"""Dense inside a node, sparse between."""

import os

import pytest
import torch

import gradwire
from gradwire.exchange import EXCHANGES
from gradwire.exchange.hierarchical import _largest
from gradwire.ranks.virtual import VirtualRanks
from tests.exchange.cases import Hand


@pytest.mark.parametrize(("world", "local"), [(4, 2), (6, 3), (6, 2), (3, 3), (3, 1)])
def test_each_node_sends_the_largest_of_its_sum(world, local):
    u = [torch.randn(900) for _ in range(world)]
    out = Hand("hierarchical", world, local=local).step(u, 30)
    update = torch.zeros(900)
    for node in range(world // local):
        total = torch.stack(u[node * local : (node + 1) * local]).sum(0)
        part = 900 // local
        sent = torch.cat([gradwire.compress(x, k=30 // local).dense() for x in total.split(part)])
        update += sent / world
        for rank in range(node * local, (node + 1) * local):
            assert torch.equal(out.residuals[rank], torch.where(sent != 0, 0, u[rank]))
    torch.testing.assert_close(out.updates[0], update)


def test_a_part_that_is_longer_than_the_vector_ends_in_padding():
    chosen = _largest(torch.tensor([[1.0, 2, 0, 0, 0], [3, 2, 0, 0, 0]]), 4, first=7, size=10)
    assert chosen.indices.tolist() == [7, 8, 9, 10]
    assert chosen.values.tolist() == [4, 4, 0, 0]
    assert int(chosen.count) == 3


def test_torchrun_says_how_large_a_node_is(monkeypatch):
    cost = EXCHANGES["hierarchical"].rounds
    assert cost(8) == cost(8, local=8) == 14
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cost(8) == cost(8, local=2) == 2 + 3


def test_nodes_of_different_sizes_are_refused():
    cluster = gradwire.VirtualCluster(6, exchange="hierarchical", density=0.01, local=4)
    with pytest.raises(ValueError, match=r"6 ranks .* nodes of 4; give local=1 or 2 or 3 or 6"):
        cluster.average([torch.randn(1000)] * 6)


def test_parts_of_a_group():
    ranks = VirtualRanks(6)

    def work(rank):
        inside, between = ranks.groups[rank].split(2)
        again = ranks.groups[rank].split(2)
        assert again == (inside, between)
        mine = torch.tensor([rank])
        found = [part.all_gather(mine).view(-1).tolist() for part in (inside, between)]
        return found, (inside.rank, between.rank), ranks.groups[rank].bytes_sent

    for rank, (found, places, sent) in enumerate(ranks.run(work)):
        first = rank // 2 * 2
        assert found == [[first, first + 1], [rank % 2, 2 + rank % 2, 4 + rank % 2]]
        assert places == (rank % 2, rank // 2)
        assert sent == 8 + 16


def disagreeing(rank):
    os.environ["LOCAL_WORLD_SIZE"] = str(rank + 1)
    try:
        options = {"exchange": "hierarchical", "density": 0.01, "dense_below": 0}
        gradwire.average([torch.randn(1000)], gradwire.State(**options))
    except gradwire.errors.ExchangeError as error:
        return str(error)
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
    return "no error"


def test_ranks_that_disagree_on_the_size_of_a_node(ranks):
    for said in ranks.run(2, disagreeing):
        assert "split: rank 1 has local 2, rank 0 has 1" in said
