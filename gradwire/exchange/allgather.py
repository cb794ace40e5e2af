"""Everyone sends its entries to everyone."""

from torch import Tensor

from gradwire.cluster.group import Group
from gradwire.encode import Encoding, Message, nbytes
from gradwire.exchange.outcome import Outcome
from gradwire.kernels import decode
from gradwire.stages import stage


def allgather(message: Message, u: Tensor, group: Group) -> Outcome:
    """Every rank's entries to every rank, in one all-gather.

    1. gather the P messages; 2. from zero, add them one by one in rank order, so that every rank
    gets the same bits. A rank that is not finite makes the start NaN instead of zero.
    """
    gathered = group.all_gather(message.buffer)
    with stage("decode"):
        mine = message.chosen
        common = mine.indices if mine.common else None
        update, ok = decode(
            gathered, message.buffer, mine.size, mine.capacity, message.encoding.dtype, common
        )
    return Outcome(update, message.delivered, ok)


def allgather_bytes(ranks: int, size: int, capacity: int, encoding: Encoding) -> int:
    """A ring passes each message on P - 1 times."""
    return (ranks - 1) * nbytes(capacity, encoding)
