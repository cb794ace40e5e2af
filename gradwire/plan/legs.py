"""What each exchange sends over which links: its bytes and rounds, taken apart into legs.

Their sums are `EXCHANGES[name].bytes` and `.rounds`: of the rank that sends most.
"""

from collections.abc import Callable

from gradwire.encode import HEADER, Encoding, nbytes
from gradwire.encode.indices import index_bytes
from gradwire.exchange import EXCHANGES
from gradwire.exchange.sketch_size import Table
from gradwire.plan.network import Leg, Network

Legs = Callable[[Network, int, int, Encoding], list[Leg]]


def legs(
    exchange: str, network: Network, size: int, capacity: int, encoding: Encoding
) -> list[Leg]:
    """The legs of one bundle of `size` entries, messages with room for `capacity` of them."""
    if network.workers == 1:
        return []
    return LEGS[exchange](network, size, capacity, encoding.settled(size, capacity))


def _allgather(network: Network, size: int, capacity: int, encoding: Encoding) -> list[Leg]:
    others = network.workers - 1
    return [network.ring(others * nbytes(capacity, encoding, size), others)]


def _dense(network: Network, size: int, capacity: int, encoding: Encoding) -> list[Leg]:
    ranks, cost = network.workers, EXCHANGES["dense"]
    return [network.ring(cost.bytes(ranks, size, capacity, encoding), cost.rounds(ranks))]


def _dense_bf16(network: Network, size: int, capacity: int, encoding: Encoding) -> list[Leg]:
    return _ordered(network, size + 1, 2)


def _ordered(network: Network, entries: int, itemsize: int) -> list[Leg]:
    """A part to its owner, the parts of the mean to everyone."""
    others = network.workers - 1
    sent = others * -(-entries // network.workers) * itemsize
    return [network.everyone(sent, others), network.ring(sent, others)]


def _union(network: Network, size: int, capacity: int, encoding: Encoding) -> list[Leg]:
    ranks = network.workers
    lists = (ranks - 1) * (HEADER + index_bytes(encoding.indices, size, capacity))
    entries = capacity if encoding.indices == "common" else min(size, ranks * capacity)
    mean = _ordered(network, entries, encoding.dtype.itemsize)
    return [network.ring(lists, ranks - 1), *mean]


def _gtopk(network: Network, size: int, capacity: int, encoding: Encoding) -> list[Leg]:
    one = nbytes(capacity, encoding, size)
    rounds, power = _doubling(network.workers)
    swaps = [network.pairs(one, 1 << r) for r in range(rounds)]
    if network.workers > power:
        # A rank that takes another in sends nothing in the first round, and hands back in the last.
        swaps += [network.pairs(0, power), network.pairs(one, power)]
    return swaps


def _oktopk(network: Network, size: int, capacity: int, encoding: Encoding) -> list[Leg]:
    ranks = network.workers
    total = EXCHANGES["oktopk"].bytes(ranks, size, capacity, encoding)
    places = 4 * ranks * (ranks - 1)
    sent = (total - places) // 2
    return [network.everyone(sent, ranks - 1), network.ring(sent + places, ranks - 1)]


def _sketched(network: Network, size: int, capacity: int, encoding: Encoding) -> list[Leg]:
    table, itemsize = Table(), encoding.dtype.itemsize
    cells = _ordered(network, table.cells(size) + 1, itemsize)
    return cells + _ordered(network, table.many(size, capacity), itemsize)


def _gs_sgd(network: Network, size: int, capacity: int, encoding: Encoding) -> list[Leg]:
    table, itemsize = Table(), encoding.dtype.itemsize
    out: list[Leg] = []
    for entries in (table.cells(size) + 1, table.many(size, capacity)):
        rounds, power = _doubling(network.workers)
        part = -(-entries // power) * itemsize
        halving = [network.pairs(part << r, 1 << r) for r in reversed(range(rounds))]
        out += halving + halving[::-1]
        if network.workers > power:
            out += [network.pairs(0, power), network.pairs(power * part, power)]
    return out


def _hierarchical(network: Network, size: int, capacity: int, encoding: Encoding) -> list[Leg]:
    n, nodes = network.local, network.nodes
    one = nbytes(-(-capacity // n), encoding, size)
    return [
        network.inside((n - 1) * 4 * -(-size // n), n - 1),
        network.across((nodes - 1) * one, nodes - 1),
        network.inside((n - 1) * nodes * one, n - 1),
    ]


def _doubling(ranks: int) -> tuple[int, int]:
    """n and 2^n, the largest power of two that is not above the ranks."""
    rounds = ranks.bit_length() - 1
    return rounds, 1 << rounds


LEGS: dict[str, Legs] = {
    "allgather": _allgather,
    "union": _union,
    "gtopk": _gtopk,
    "oktopk": _oktopk,
    "sketched": _sketched,
    "gs-sgd": _gs_sgd,
    "hierarchical": _hierarchical,
    "dense": _dense,
    "dense-bf16": _dense_bf16,
}
