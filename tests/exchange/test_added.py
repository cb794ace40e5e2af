"""A new exchange is one function and one line: it trains, is planned, saved and resumed."""

import pytest
import torch

import gradwire
from gradwire.config import Config
from gradwire.encode import Encoding
from gradwire.errors import ConfigError
from gradwire.exchange import EXCHANGES, Exchange, Outcome
from gradwire.plan.network import Network
from gradwire.types import Entries

STEPS, SIZE, P = 4, 3000, 3


def dense_int8(message, u, group, memory, *, times: int = 1):
    """Entries as they were chosen, one rank's after the other."""
    rows = group.all_gather(message.sparse.dense())
    ok = group.all_gather(message.finite.float().view(1)).min() == 1
    update = torch.cat([rows.sum(0) / group.size, rows.new_zeros(1)])
    memory["dense-int8.steps"] = memory.get("dense-int8.steps", torch.zeros(1)) + times
    return Outcome(torch.where(ok, update, float("nan")), Entries(message.sparse), ok)


def dense_bytes(ranks, size, capacity, encoding, **options):
    return 8 * (ranks - 1) * capacity


def dense_rounds(ranks, **options):
    return ranks - 1


@pytest.fixture
def added():
    # The name begins as those do that send everything: nobody may go by it.
    exchange = EXCHANGES["dense-int8"] = Exchange(dense_int8, dense_bytes, dense_rounds)
    yield exchange
    del EXCHANGES["dense-int8"]


def gradients(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(SIZE, generator=generator) for _ in range(P)]


def test_it_trains_and_the_law_holds(added):
    cluster = gradwire.VirtualCluster(P, method="topk/dense-int8", density=0.01, dense_below=0)
    kept = torch.zeros(SIZE)
    for step in range(STEPS):
        mine = gradients(step)
        updates = cluster.average(mine)
        left = sum(cluster.residual(rank) for rank in range(P))
        update = updates[0] if isinstance(updates, list) else updates
        torch.testing.assert_close(sum(mine) + kept, P * update + left)
        assert 0 < int(update.count_nonzero()) <= 30 * P
        kept = left


def test_it_is_saved_and_resumed(added):
    whole, first = (
        gradwire.VirtualCluster(P, method="topk", exchange="dense-int8", dense_below=0, times=2)
        for _ in range(2)
    )
    for step in range(STEPS):
        last = whole.average(gradients(step))
        if step < 2:
            first.average(gradients(step))
    second = gradwire.VirtualCluster(
        P, method="topk", exchange="dense-int8", dense_below=0, times=2
    )
    second.load_state_dict(first.state_dict())
    for step in range(2, STEPS):
        again = second.average(gradients(step))
    for one, other in zip(last, again, strict=True):
        assert torch.equal(one, other)


def test_it_is_planned(added):
    found = gradwire.plan("resnet20", workers=4, link="100mbit", methods=["topk/dense-int8"])
    ways = [p for p in found.predictions if p.way.exchange == "dense-int8"]
    assert ways
    assert all(p.bytes > 0 and p.exchange > 0 for p in ways)
    # Without a preference it is predicted, and never recommended.
    assert found.recommendation.fields.get("exchange") != "dense-int8"
    everything = gradwire.plan("resnet20", workers=4, link="100mbit")
    assert any(p.way.exchange == "dense-int8" for p in everything.predictions)


def test_without_legs_it_is_one_ring(added):
    network = Network(4, 4, rate=1e6)
    (leg,) = added.legs_on(network, 1000, 10, Encoding())
    assert (leg.bytes, leg.rounds) == (8 * 3 * 10, 3)


def test_what_it_can_do_is_its_own_to_say(added):
    with pytest.raises(ConfigError, match=r"exchanges .*; 'dense-int8' rounds to the nearest"):
        Config(method="topk/dense-int8", values="int8", rounding="stochastic")
    Config(method="topk/dense-int8", values="int8")
    EXCHANGES["dense-int8"] = Exchange(dense_int8, dense_bytes, dense_rounds, stochastic=True)
    Config(method="topk/dense-int8", values="int8", rounding="stochastic")
