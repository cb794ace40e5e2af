"""Pairs of workers merge what they chose, and keep k of it, until all hold the same k."""

from dataclasses import replace

import torch
from torch import Tensor

from gradwire.cluster.group import Group
from gradwire.encode import Encoding, Message, encode, nbytes
from gradwire.encode.noise import Noise
from gradwire.exchange.outcome import Outcome
from gradwire.exchange.union import merge
from gradwire.kernels import spread, topk
from gradwire.stages import stage
from gradwire.types import Sparse


def gtopk(message: Message, u: Tensor, group: Group) -> Outcome:
    """The k largest of all workers together, merged in pairs.

    gTop-k of Shi et al. (2019) in log2 P rounds, by recursive doubling instead of a tree and a
    broadcast: in round r the groups of 2^r ranks that hold the same k entries swap them, add what
    both have and keep the k largest. When P is not a power of two, the ranks beyond the largest
    one hand their entries over first and get the result last. Sends one message a round.
    Different from the paper: what a merge cuts, or rounds, stays with the lowest rank of the merged
    group, as residual. In the paper an entry that is cut and comes back by another branch is lost.
    """
    steps = Merging(message, group)
    power = 1 << (group.size.bit_length() - 1)
    extra = group.size - power
    rank = group.rank
    fold_to = rank - power if rank >= power else None
    fold_from = rank + power if rank < extra else None
    steps.round(fold_to, fold_from, keeper=rank < power)
    for r in range(power.bit_length() - 1):
        partner = rank ^ (1 << r) if rank < power else None
        steps.round(partner, partner, keeper=rank % (2 << r) == 0 and rank < power)
    result = steps.hand_back(fold_from, fold_to)
    with stage("decode"):
        entries, ok = message.unpack(result)
        update = u.new_empty(u.numel() + 1)
        update.copy_(torch.where(ok, 0.0, float("nan")))
        spread(update, entries.indices, entries.values / group.size)
    return Outcome(update, steps.delivered, ok)


class Merging:
    """The k entries this rank holds on the way, and what it has really given so far."""

    def __init__(self, message: Message, group: Group) -> None:
        self._like = message
        self._group = group
        self._message = message
        self.delivered = message.delivered
        self._rounds = 0

    def round(self, to: int | None, source: int | None, keeper: bool) -> None:
        """Send what this rank holds, merge what it gets; the keeper takes back what is cut."""
        received = self._group.swap(self._message.buffer, to, source)
        self._rounds += 1
        if received is None:
            return
        with stage("decode"):
            mine, usable = self._like.unpack(self._message.buffer)
            other, also = self._like.unpack(received)
            summed = add(mine, other)
        with stage("compress"):
            chosen = keep(summed, mine.capacity)
        with stage("encode"):
            like = self._like
            self._message = encode(
                chosen, usable & also, like.encoding, noise=self._noise(like.noise)
            )
            if keeper:
                cut = subtract(summed, self._message.delivered)
                self.delivered = subtract(self.delivered, cut)

    def _noise(self, own: Noise | None) -> Noise | None:
        """The same bits for all ranks that merge the same entries; others in every round."""
        return None if own is None else replace(own, rank=self._group.size + self._rounds)

    def hand_back(self, to: int | None, source: int | None) -> Tensor:
        """The result: sent to the rank that had folded in, or got from the one it folded to."""
        received = self._group.swap(self._message.buffer, to, source)
        return self._message.buffer if received is None else received


def add(a: Sparse, b: Sparse) -> Sparse:
    """a + b: at most as many entries as both have room for. At most two numbers meet in a sum."""
    if a.common:
        return replace(a, values=a.values + b.values)
    where = merge(torch.cat([a.indices, b.indices]), a.size)
    values = torch.zeros(where.numel() + 1, device=where.device)
    for part in (a, b):
        # Padding points behind the last entry; searchsorted finds some place, its value is zero.
        values.index_add_(0, torch.searchsorted(where, part.indices), part.values)
    count = (where < a.size).sum(dtype=torch.int32)
    return Sparse(where, values[:-1], count, a.size)


def subtract(a: Sparse, b: Sparse) -> Sparse:
    """a - b."""
    return add(a, replace(b, values=-b.values))


def keep(sparse: Sparse, k: int) -> Sparse:
    """The k entries of largest magnitude; ties go to the smaller index."""
    if sparse.common:
        return sparse
    places = topk(sparse.values, min(k, sparse.capacity))
    indices, values = sparse.indices[places], sparse.values[places]
    if missing := k - places.numel():
        indices = torch.cat([indices, indices.new_full((missing,), sparse.size)])
        values = torch.cat([values, values.new_zeros(missing)])
    return Sparse(indices, values, (indices < sparse.size).sum(dtype=torch.int32), sparse.size)


def gtopk_bytes(ranks: int, size: int, capacity: int, encoding: Encoding) -> int:
    """The most that leaves one rank: a message in each of log2 P rounds, and one to hand back."""
    rounds = ranks.bit_length() - 1
    power = 1 << rounds
    return nbytes(capacity, encoding, size) * (rounds + (1 if ranks > power else 0))
