"""Everyone agrees on the entries first, then adds what everyone has there."""

from typing import TYPE_CHECKING

from torch import Tensor

from gradwire.encode import HEADER, Encoding, Message
from gradwire.encode.format import index_bytes
from gradwire.exchange.exchange import Outcome
from gradwire.exchange.means import ordered_bytes, ordered_legs, ordered_mean, ordered_rounds
from gradwire.kernels import join, spread, start
from gradwire.ranks.group import Group
from gradwire.stages import stage
from gradwire.types import Entries, Memory, Sparse

if TYPE_CHECKING:
    from gradwire.exchange.exchange import Received
    from gradwire.plan.network import Leg, Network


def union(message: Message, u: Tensor, group: Group, memory: Memory) -> Outcome:
    """Everyone's values where anyone chose: 1.5x allgather's bytes.

    1. gather the P index lists; 2. every rank merges them into the same ascending list of at most
    min(d, P k) entries, padded to that, so that no host needs its length; 3. the mean of all
    workers' values there, added in rank order (see `ordered_mean`). A worker delivers on the whole
    union, also where others chose: the residuals stay smaller than with `allgather` ("variant B"
    of TopK-SGD, as in the code of Yoon and Oh). With common indices the union is k entries.
    """
    gathered = group.all_gather(message.index_part)
    with stage("decode"):
        lists, ok = message.unpack_indices(gathered)
        where, values, count = join(lists, u)
    mean, given = ordered_mean(values, message.encoding.dtype, group)
    with stage("decode"):
        update = u.new_empty(u.numel() + 1)
        start(update, ok)
        spread(update, where, mean)
    return Outcome(update, Entries(Sparse(where, given, count, u.numel())), ok)


def union_bytes(ranks: int, size: int, capacity: int, encoding: Encoding) -> int:
    """The index lists on a ring, and 2 (P - 1) / P of the values on at most min(d, P k) entries."""
    name = encoding.settled(size, capacity).indices
    indices = (ranks - 1) * (HEADER + index_bytes(name, size, capacity))
    entries = capacity if name == "common" else min(size, ranks * capacity)
    return indices + ordered_bytes(ranks, entries, encoding.dtype.itemsize)


def union_rounds(ranks: int) -> int:
    """Once around the ring, and an ordered mean."""
    return ranks - 1 + ordered_rounds(ranks)


def union_legs(network: "Network", size: int, capacity: int, encoding: Encoding) -> "list[Leg]":
    """The lists on a ring, then an ordered mean."""
    ranks = network.workers
    lists = (ranks - 1) * (HEADER + index_bytes(encoding.indices, size, capacity))
    entries = capacity if encoding.indices == "common" else min(size, ranks * capacity)
    mean = ordered_legs(network, entries, encoding.dtype.itemsize)
    return [network.ring(lists, ranks - 1), *mean]


def union_received(got: "Received") -> float:
    """Every list is merged too."""
    return got.ranks * got.k * (got.read + got.merge + got.add)
