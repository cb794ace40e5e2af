"""Dense exchange in half the bytes: every rank sends every entry as bf16."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire.encode import Encoding, Message
from gradwire.exchange.exchange import Exchange, Outcome
from gradwire.exchange.means import ordered_bytes, ordered_legs, ordered_mean, ordered_rounds
from gradwire.ranks.group import Group
from gradwire.stages import stage
from gradwire.types import Memory, Rounded

if TYPE_CHECKING:
    from gradwire.plan.network import Leg, Network


def dense_bf16(message: Message, u: Tensor, group: Group, memory: Memory) -> Outcome:
    """Every entry, as bf16; the residual keeps the rounding errors.

    The mean of PyTorch's bf16_compress_hook rounds at every hop of the ring. Here each value is
    rounded once on its way and once in the mean. Both errors go to a residual.
    """
    chosen = u if message.sparse is None else message.sparse.dense()
    broken = (1 - message.finite).float().view(1)
    mean, contribution = ordered_mean(torch.cat([chosen, broken]), torch.bfloat16, group)
    with stage("decode"):
        ok = mean[-1] == 0
        update = mean + torch.where(ok, mean.new_zeros(()), float("nan"))
    return Outcome(update, Rounded(contribution[:-1]), ok)


def dense_bf16_bytes(ranks: int, size: int, capacity: int, encoding: Encoding) -> int:
    """Return the bytes that leave one rank: 2 (P - 1) / P of the entries, two bytes each.

    One more entry tells if a rank was not finite.
    """
    return ordered_bytes(ranks, size + 1, 2)


def dense_bf16_legs(
    network: "Network", size: int, capacity: int, encoding: Encoding
) -> "list[Leg]":
    """Return the legs of an ordered mean."""
    return ordered_legs(network, size + 1, 2)


EXCHANGE = Exchange(
    dense_bf16,
    dense_bf16_bytes,
    ordered_rounds,
    ("fp32",),
    whole="bf16",
    legs=dense_bf16_legs,
)
