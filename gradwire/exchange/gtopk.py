"""Pairs of workers merge what they chose, and keep k of it, until all hold the same k."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire.encode import Encoding, Message, encode, nbytes
from gradwire.encode.noise import Noise
from gradwire.errors import unknown
from gradwire.exchange.exchange import Outcome
from gradwire.exchange.means import doubling
from gradwire.exchange.sparse_sum import add, keep, restrict, subtract
from gradwire.kernels import spread, start
from gradwire.ranks.group import Group
from gradwire.stages import stage
from gradwire.types import Entries, Memory, Sparse

if TYPE_CHECKING:
    from gradwire.exchange.exchange import LocalTask, Received
    from gradwire.plan.network import Leg, Network
    from gradwire.plan.work import Work

MERGES = ("lossless", "paper")


def gtopk(
    message: Message, u: Tensor, group: Group, memory: Memory, *, merge: str = "lossless"
) -> Outcome:
    """The k largest of all workers together, merged in pairs.

    gTop-k of Shi et al. (2019) in log2 P rounds, by recursive doubling instead of a tree and a
    broadcast: in round r the groups of 2^r ranks that hold the same k entries swap them, add what
    both have and keep the k largest. When P is not a power of two, the ranks beyond the largest
    one hand their entries over first and get the result last. Sends one message a round.
    Different from the paper: what a merge cuts, or rounds, stays with the lowest rank of the merged
    group, as residual. In the paper an entry that is cut and comes back by another branch is lost:
    merge="paper" does that, and `wire.stats().leaked` says how much (rounding by merges is lost
    too, but not counted).
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
        start(update, ok)
        spread(update, entries.indices, entries.values / group.size)
        if merge == "paper":
            given, leaked = steps.as_published(entries)
            return Outcome(update, Entries(given), ok, leaked)
    return Outcome(update, Entries(steps.given()), ok)


class Merging:
    """The k entries this rank holds on the way, and what it has really given so far."""

    def __init__(self, message: Message, group: Group) -> None:
        self._like = message
        self._group = group
        self._message = message
        self._rounds = 0
        self._cuts: list[Sparse] = []
        self._watched = [message.delivered]
        self._sets: list[Tensor] = []

    def round(self, to: int | None, source: int | None, keeper: bool) -> None:
        """Send what this rank holds, merge what it gets; the keeper takes back what is cut."""
        received = self._group.swap(self._message.buffer, to, source)
        self._rounds += 1
        if received is None:
            return
        with stage("decode"):
            both = torch.stack([self._message.buffer, received])
            (mine, other), usable = self._like.unpack_all(both)
            summed = add(mine, other)
        with stage("compress"):
            chosen = keep(summed, mine.capacity)
        with stage("encode"):
            like = self._like
            self._message = encode(chosen, usable, like.encoding, noise=self._noise(like.noise))
            self._sets.append(chosen.indices)
            if to is None:
                self._watched.append(other)
            if keeper:
                self._cuts.append(subtract(summed, self._message.delivered))

    def _noise(self, own: Noise | None) -> Noise | None:
        """The same bits for all ranks that merge the same entries; others in every round."""
        return None if own is None else replace(own, rank=self._group.size + self._rounds)

    def hand_back(self, to: int | None, source: int | None) -> Tensor:
        """The result: sent to the rank that had folded in, or got from the one it folded to."""
        received = self._group.swap(self._message.buffer, to, source)
        return self._message.buffer if received is None else received

    def given(self) -> Sparse:
        """Return what this rank chose, less what its merges cut."""
        out = self._like.delivered
        for cut in self._cuts:
            out = subtract(out, cut)
        return out

    def as_published(self, result: Sparse) -> tuple[Sparse, Tensor]:
        """What this rank chose of the result; and the energy of what is lost, and of all chosen.

        The published residual keeps what is not in the result, and nothing of what is. Lost is what
        is in the result, but was not in a set on the way. A rank that took in another, which sees
        no sets, counts for both.
        """
        leaked = torch.zeros(2, dtype=torch.float64, device=result.indices.device)
        for chosen in self._watched if self._sets else ():
            there = alive = restrict(chosen, result.indices)
            for indices in self._sets:
                alive = restrict(alive, indices)
            leaked += torch.stack([_energy(there) - _energy(alive), _energy(chosen)])
        return restrict(self._watched[0], result.indices), leaked


def _energy(sparse: Sparse) -> Tensor:
    return sparse.values.double().square().sum()


def gtopk_check(merge: str = "lossless") -> None:
    """Raises for a merge that does not exist."""
    if merge not in MERGES:
        raise unknown("merge of gtopk", merge, MERGES)


def gtopk_rounds(ranks: int, **options: Any) -> int:
    """log2 P, and two more when P is not a power of two."""
    rounds = ranks.bit_length() - 1
    return rounds + (2 if ranks > 1 << rounds else 0)


def gtopk_bytes(ranks: int, size: int, capacity: int, encoding: Encoding, **options: Any) -> int:
    """The most that leaves one rank: a message in each of log2 P rounds, and one to hand back."""
    rounds = ranks.bit_length() - 1
    power = 1 << rounds
    return nbytes(capacity, encoding, size) * (rounds + (1 if ranks > power else 0))


def gtopk_legs(network: "Network", size: int, capacity: int, encoding: Encoding) -> "list[Leg]":
    """A swap with a partner twice as far away in each round."""
    one = nbytes(capacity, encoding, size)
    rounds, power = doubling(network.workers)
    swaps = [network.pairs(one, 1 << r) for r in range(rounds)]
    if network.workers > power:
        # A rank that takes another in sends nothing in the first round, and hands back in the last.
        swaps += [network.pairs(0, power), network.pairs(one, power)]
    return swaps


def gtopk_received(got: "Received") -> float:
    """Each merge adds, selects, encodes, and subtracts what it cut."""
    return _merges(got.ranks) * 2 * got.k * (got.read + 10 * got.merge) + got.k * got.add


def gtopk_work(usual: "Work", task: "LocalTask") -> "Work":
    """A merge takes some time however small it is."""
    return replace(usual, decode=usual.decode + _merges(task.ranks) * task.merging)


def _merges(ranks: int) -> int:
    """Rounds of a tree, and one before it for ranks that do not make a power of two."""
    return ranks.bit_length() - 1 + (ranks & (ranks - 1) > 0)
