"""Everyone sends everything, in half the bytes."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire.encode import Encoding, Message
from gradwire.exchange.exchange import Outcome
from gradwire.exchange.means import ordered_bytes, ordered_legs, ordered_mean
from gradwire.ranks.group import Group
from gradwire.stages import stage
from gradwire.types import Memory, Rounded

if TYPE_CHECKING:
    from gradwire.plan.network import Leg, Network


def dense_bf16(message: Message, u: Tensor, group: Group, memory: Memory) -> Outcome:
    """Every entry, as bf16; what rounding takes away stays.

    The mean of PyTorch's bf16_compress_hook rounds at every hop of the ring; here each value is
    rounded once on its way and once in the mean, and both errors go to a residual.
    """
    chosen = u if message.sparse is None else message.sparse.dense()
    broken = (1 - message.finite).float().view(1)
    mean, given = ordered_mean(torch.cat([chosen, broken]), torch.bfloat16, group)
    with stage("decode"):
        ok = mean[-1] == 0
        update = mean + torch.where(ok, mean.new_zeros(()), float("nan"))
    return Outcome(update, Rounded(given[:-1]), ok)


def dense_bf16_bytes(ranks: int, size: int, capacity: int, encoding: Encoding) -> int:
    """2 (P - 1) / P of the entries, two bytes each; one entry more says who was finite."""
    return ordered_bytes(ranks, size + 1, 2)


def dense_bf16_legs(
    network: "Network", size: int, capacity: int, encoding: Encoding
) -> "list[Leg]":
    """Those of an ordered mean."""
    return ordered_legs(network, size + 1, 2)
