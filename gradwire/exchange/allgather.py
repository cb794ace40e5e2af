"""Everyone sends its entries to everyone."""

import torch
from torch import Tensor

from gradwire.cluster.group import Group
from gradwire.encode import Encoding, Message, nbytes
from gradwire.exchange.outcome import Outcome
from gradwire.kernels import decode, spread
from gradwire.stages import stage
from gradwire.types import Memory


def allgather(message: Message, u: Tensor, group: Group, memory: Memory) -> Outcome:
    """Every rank's entries to every rank, in one all-gather.

    1. gather the P messages; 2. from zero, add them one by one in rank order, so that every rank
    gets the same bits. A rank that is not finite makes the start NaN instead of zero.
    """
    gathered = group.all_gather(message.buffer)
    with stage("decode"):
        update, ok = mean_of(message, gathered)
    return Outcome(update, message.delivered, ok)


def mean_of(message: Message, gathered: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of messages like this one, added in their order, and whether all can be used."""
    return (_fused if message.encoding.plain else _one_by_one)(message, gathered)


def _fused(message: Message, gathered: Tensor) -> tuple[Tensor, Tensor]:
    mine = message.chosen
    common = mine.indices if mine.common else None
    dtype = message.encoding.dtype
    return decode(gathered, message.buffer, mine.size, mine.capacity, dtype, common)


def _one_by_one(message: Message, gathered: Tensor) -> tuple[Tensor, Tensor]:
    received = [message.unpack(row) for row in gathered.unbind()]
    ok = torch.stack([usable for _, usable in received]).all()
    update = torch.empty(message.chosen.size + 1, device=gathered.device)
    update.copy_(torch.where(ok, 0.0, float("nan")))
    for entries, _ in received:
        spread(update, entries.indices, entries.values / len(received))
    return update, ok


def allgather_bytes(ranks: int, size: int, capacity: int, encoding: Encoding) -> int:
    """A ring passes each message on P - 1 times."""
    return (ranks - 1) * nbytes(capacity, encoding, size)


def allgather_rounds(ranks: int) -> int:
    """Once around the ring."""
    return ranks - 1
