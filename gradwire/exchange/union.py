"""Union: workers first agree on the entries, then add all workers' values there."""

from typing import TYPE_CHECKING

from torch import Tensor

from gradwire.encode import HEADER, Encoding, Message
from gradwire.encode.format import index_bytes
from gradwire.exchange.exchange import SUMMED, Exchange, Outcome
from gradwire.exchange.means import ordered_bytes, ordered_legs, ordered_mean, ordered_rounds
from gradwire.kernels import add_entries, join, reset_mean
from gradwire.ranks.group import Group
from gradwire.stages import stage
from gradwire.types import Entries, Memory, Sparse

if TYPE_CHECKING:
    from gradwire.exchange.exchange import Received
    from gradwire.plan.network import Leg, Network


def union(message: Message, u: Tensor, group: Group, memory: Memory) -> Outcome:
    """The values of all workers wherever any worker chose: 1.5x allgather's bytes.

    1. Gather the P index lists.
    2. Every rank merges the lists into the same ascending list of at most min(d, P k) entries. The
       list is padded to that length, so that no host needs a count.
    3. Take the mean of all workers' values there, added in rank order (see `ordered_mean`).

    A worker delivers on the whole union, also at entries that only others chose. The residuals
    therefore stay smaller than with `allgather` ("variant B" of TopK-SGD, as in the code of Yoon
    and Oh). With common indices the union is k entries.
    """
    gathered = group.all_gather(message.index_part)
    with stage("decode"):
        lists, ok = message.unpack_indices(gathered)
        indices, values, count = join(lists, u)
    mean, contribution = ordered_mean(values, message.encoding.dtype, group)
    with stage("decode"):
        update = u.new_empty(u.numel() + 1)
        reset_mean(update, ok)
        add_entries(update, indices, mean)
    return Outcome(update, Entries(Sparse(indices, contribution, count, u.numel())), ok)


def union_bytes(ranks: int, size: int, capacity: int, encoding: Encoding) -> int:
    """Return the bytes that leave one rank: the index lists on a ring, and the values.

    2 (P - 1) / P of the values on at most min(d, P k) entries leave a rank.
    """
    name = encoding.settled(size, capacity).indices
    indices = (ranks - 1) * (HEADER + index_bytes(name, size, capacity))
    entries = capacity if name == "common" else min(size, ranks * capacity)
    return indices + ordered_bytes(ranks, entries, encoding.dtype.itemsize)


def union_rounds(ranks: int) -> int:
    """Return the rounds: once around the ring, and an ordered mean."""
    return ranks - 1 + ordered_rounds(ranks)


def union_legs(network: "Network", size: int, capacity: int, encoding: Encoding) -> "list[Leg]":
    """Return the legs: the lists on a ring, then an ordered mean."""
    ranks = network.workers
    lists = (ranks - 1) * (HEADER + index_bytes(encoding.indices, size, capacity))
    entries = capacity if encoding.indices == "common" else min(size, ranks * capacity)
    mean = ordered_legs(network, entries, encoding.dtype.itemsize)
    return [network.ring(lists, ranks - 1), *mean]


def union_received(received: "Received") -> float:
    """Return the nanoseconds: every list is read, merged and added."""
    return received.ranks * received.k * (received.read + received.merge + received.add)


EXCHANGE = Exchange(
    union,
    union_bytes,
    union_rounds,
    SUMMED,
    adds_u=True,
    legs=union_legs,
    received=union_received,
    preference=5,
)
