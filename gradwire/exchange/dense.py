"""Dense exchange: every rank sends every entry, in one all-reduce."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire.encode import Encoding, Message
from gradwire.exchange.exchange import Exchange, Outcome
from gradwire.kernels import add_entries
from gradwire.ranks.group import Group
from gradwire.stages import stage
from gradwire.types import Entries, Everything, Memory

if TYPE_CHECKING:
    from gradwire.plan.network import Leg, Network


def dense(message: Message, u: Tensor, group: Group, memory: Memory) -> Outcome:
    """Every entry, in one fp32 all-reduce.

    Each rank sends 2 (P - 1) / P of the gradient. Without a selection every entry of u goes. With a
    selection the chosen entries go, and zeros in place of the others. The spare last entry sums up
    the number of ranks that were not finite.
    """
    with stage("encode"):
        update = u.new_zeros(u.numel() + 1)
        if message.sparse is None:
            update[:-1] = u
        else:
            add_entries(update, message.sparse.indices, message.sparse.values)
        update[-1] = 1 - message.finite
    group.all_reduce(update)
    with stage("decode"):
        ok = update[-1] == 0
        ranks = update.new_full((), float(group.size))
        update.div_(torch.where(ok, ranks, float("nan")))
    sent = Everything() if message.sparse is None else Entries(message.sparse)
    return Outcome(update, sent, ok)


def dense_bytes(ranks: int, size: int, capacity: int, encoding: Encoding) -> int:
    """Return the bytes that leave one rank: 2 (P - 1) chunks of size / P.

    One more entry counts the ranks that were not finite.
    """
    return 2 * (ranks - 1) * 4 * (size + 1) // ranks


def dense_rounds(ranks: int) -> int:
    """Return the rounds: twice around the ring."""
    return 2 * (ranks - 1)


def dense_legs(network: "Network", size: int, capacity: int, encoding: Encoding) -> "list[Leg]":
    """Return the leg of one all-reduce."""
    return [network.all_reduce(dense_bytes(network.workers, size, capacity, encoding))]


EXCHANGE = Exchange(dense, dense_bytes, dense_rounds, ("fp32",), whole="fp32", legs=dense_legs)
