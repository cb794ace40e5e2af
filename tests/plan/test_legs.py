"""What the planner lets travel is what the exchanges say they send."""

import pytest

from gradwire.encode import Encoding
from gradwire.exchange import EXCHANGES
from gradwire.plan.network import Leg, Network

KINDS = [("fp32", "int32"), ("bf16", "packed"), ("int8", "packed"), ("fp32", "common")]


@pytest.mark.parametrize("name", sorted(EXCHANGES))
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 16])
def test_the_legs_add_up_to_the_bytes_and_rounds_of_the_exchange(name, ranks):
    exchange = EXCHANGES[name]
    local = 2 if ranks % 2 == 0 else 1
    network = Network(ranks, ranks // local, rate=1e9)
    options = {"local": local} if exchange.has_nodes else {}
    for values, indices in KINDS:
        if values not in exchange.values:
            continue
        encoding = Encoding(values, indices)
        found = exchange.legs_on(network, 100_032, 1_000, encoding)
        assert sum(leg.bytes for leg in found) == exchange.bytes(
            ranks, 100_032, 1_000, encoding, **options
        )
        assert sum(leg.rounds for leg in found) == exchange.rounds(ranks, **options)


def test_one_worker_sends_nothing():
    for exchange in EXCHANGES.values():
        assert exchange.legs_on(Network(1, 1, rate=1e9), 1000, 10, Encoding()) == []


def test_a_nodes_link_is_shared_by_its_ranks():
    """8 ranks in 2 nodes: a ring crosses a link once; in an all-to-all 4 ranks send 4 / 7 of
    theirs; partners in the other node are met by all 4 at once, those in the own one by none."""
    network = Network(8, 2, rate=1e6, latency=0.0, local_rate=1e12, local_latency=0.0)
    assert network.seconds(network.ring(1e6, 7)) == 1
    assert network.seconds(network.everyone(7e6, 7)) == 16
    assert network.seconds(network.pairs(1e6, 4)) == 4
    assert network.seconds(network.pairs(1e6, 2)) == pytest.approx(1e-6)
    assert network.seconds(network.across(1e6, 1)) == 4


def test_a_leg_takes_latency_and_transfer():
    network = Network(4, 4, rate=1e6, latency=0.1)
    assert network.seconds(Leg(2e6, 3)) == pytest.approx(2.3)
    assert Network(4, 1, 1.0, 9.0, 1e6, 0.1).seconds(Leg(2e6, 3)) == pytest.approx(2.3)
