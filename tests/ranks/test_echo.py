"""Echo groups: tensors arrive as a group of equal ranks would send them."""

import pytest
import torch

from gradwire.config import Config
from gradwire.integrate.virtual_cluster import VirtualCluster
from gradwire.ranks.echo import EchoGroup
from gradwire.state.state import State
from gradwire.types import Slot


@pytest.mark.parametrize("exchange", ["allgather", "union", "gtopk"])
def test_a_rank_among_mirrors_gets_what_equal_ranks_agree_on(exchange):
    config = Config("topk", exchange=exchange, density=0.01, dense_below=0)
    gradient = torch.randn(5000)
    state = State(config)
    state.open(
        [Slot("gradient", (5000,), (1,), torch.float32, numel=5000)], gradient.device, EchoGroup(4)
    )
    state.begin()
    update = state.process(state.bundles[0], [gradient])
    assert torch.equal(update[:5000], VirtualCluster(4, config).average([gradient] * 4))
    assert torch.equal(update[:5000] + state.residual("gradient"), gradient)


def test_dense_exchanges_among_mirrors():
    mirror, tensor = EchoGroup(3), torch.tensor([1.0, 2.0])
    assert mirror.all_reduce(tensor.clone()).tolist() == [3.0, 6.0]
    assert mirror.all_gather(tensor).tolist() == [[1.0, 2.0]] * 3
    parts = torch.arange(6.0).view(3, 2)
    assert mirror.all_to_all(parts).tolist() == [[0.0, 1.0]] * 3
    assert mirror.swap(tensor, 1, None) is None
    assert [part.size for part in EchoGroup(6).split(2)] == [2, 3]
    assert mirror.swap(tensor, 1, 2).tolist() == [1.0, 2.0]
