"""All-gather: every rank sends its entries to every rank."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire.encode import Encoding, Message, nbytes
from gradwire.encode.unpack import unpack
from gradwire.exchange.exchange import Exchange, Outcome
from gradwire.kernels import mean_of_messages
from gradwire.kernels.side_stream import Target
from gradwire.ranks.group import Group
from gradwire.stages import stage
from gradwire.types import Entries, Memory

if TYPE_CHECKING:
    from gradwire.plan.network import Leg, Network


def allgather(
    message: Message, u: Tensor, group: Group, memory: Memory, into: Target | None = None
) -> Outcome:
    """Every rank's entries to every rank, in one all-gather.

    1. Gather the P messages.
    2. From zero, add the messages one by one in rank order, so that every rank gets the same bits.

    If a rank is not finite, the sum starts from NaN instead of zero.
    """
    gathered = group.all_gather(message.buffer)
    with stage("decode"):
        update, ok = mean_of_gathered(message, gathered, into)
    return Outcome(update, Entries(message.delivered), ok)


def mean_of_gathered(
    message: Message, gathered: Tensor, into: Target | None = None
) -> tuple[Tensor | None, Tensor]:
    """Return the mean of gathered messages like `message`, and True (0-d) if all are usable.

    The messages are added in their order.
    """
    chosen, encoding = message.chosen, message.encoding
    common = chosen.indices if chosen.common else None
    dtype = torch.float32
    if encoding.plain:
        dtype = encoding.dtype
    else:
        gathered = unpack(gathered, chosen.size, chosen.capacity, encoding)
    return mean_of_messages(
        gathered, message.buffer, chosen.size, chosen.capacity, dtype, common, into
    )


def allgather_bytes(ranks: int, size: int, capacity: int, encoding: Encoding) -> int:
    """Return the bytes that leave one rank: a ring passes each message on P - 1 times."""
    return (ranks - 1) * nbytes(capacity, encoding, size)


def allgather_rounds(ranks: int) -> int:
    """Return the rounds: once around the ring."""
    return ranks - 1


def allgather_legs(network: "Network", size: int, capacity: int, encoding: Encoding) -> "list[Leg]":
    """Return one ring."""
    others = network.workers - 1
    return [network.ring(others * nbytes(capacity, encoding, size), others)]


EXCHANGE = Exchange(
    allgather,
    allgather_bytes,
    allgather_rounds,
    fills=True,
    stochastic=True,
    legs=allgather_legs,
    preference=4,
)
