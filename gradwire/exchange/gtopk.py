"""gTop-k: pairs of workers merge their choices and keep k entries, until all hold the same k."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire.encode import Encoding, Message, encode, nbytes
from gradwire.encode.noise import Noise
from gradwire.errors import unknown
from gradwire.exchange.exchange import Exchange, Outcome
from gradwire.exchange.means import doubling_rounds
from gradwire.exchange.sparse_sum import add_sparse, keep_largest, restrict_to, subtract_sparse
from gradwire.kernels import add_entries, reset_mean
from gradwire.ranks.group import Group
from gradwire.stages import stage
from gradwire.types import Entries, Memory, Sparse

if TYPE_CHECKING:
    from gradwire.exchange.exchange import LocalTask, Received
    from gradwire.plan.network import Leg, Network
    from gradwire.plan.work import Work

_MERGES = ("lossless", "paper")


def gtopk(
    message: Message, u: Tensor, group: Group, memory: Memory, *, merge: str = "lossless"
) -> Outcome:
    """The k largest of all workers together, merged in pairs.

    gTop-k of Shi et al. (2019) in log2 P rounds, by recursive doubling instead of a tree and a
    broadcast. In round r, groups of 2^r ranks hold the same k entries. Two groups swap their
    entries, add the entries that both have, and keep the k largest. If P is not a power of two, the
    ranks beyond the largest one hand their entries over first and get the result last. A rank sends
    one message per round.
    Different from the paper: entries that a merge cuts, and its rounding errors, stay in the
    residual of the lowest rank of the merged group. In the paper an entry is lost if it is cut and
    comes back by another branch. merge="paper" does the same, and `wire.stats().leaked` measures
    the loss. (Rounding by merges is lost too, but not counted.)
    """
    steps = _Merging(message, group)
    rounds, power = doubling_rounds(group.size)
    extra = group.size - power
    rank = group.rank
    fold_to = rank - power if rank >= power else None
    fold_from = rank + power if rank < extra else None
    steps.merge_round(fold_to, fold_from, keeper=rank < power)
    for r in range(rounds):
        partner = rank ^ (1 << r) if rank < power else None
        steps.merge_round(partner, partner, keeper=rank % (2 << r) == 0 and rank < power)
    result = steps.hand_back(fold_from, fold_to)
    with stage("decode"):
        entries, ok = message.unpack(result)
        update = u.new_empty(u.numel() + 1)
        reset_mean(update, ok)
        add_entries(update, entries.indices, entries.values / group.size)
        if merge == "paper":
            contribution, leaked = steps.as_published(entries)
            return Outcome(update, Entries(contribution), ok, leaked)
    return Outcome(update, Entries(steps.contribution()), ok)


class _Merging:
    """The k entries that this rank holds on the way, and the record of its contribution."""

    def __init__(self, message: Message, group: Group) -> None:
        self._template = message
        self._group = group
        self._message = message
        self._rounds = 0
        self._cuts: list[Sparse] = []
        self._watched = [message.delivered]
        self._sets: list[Tensor] = []

    def merge_round(self, to: int | None, source: int | None, keeper: bool) -> None:
        """Send the entries of this rank, and merge the received ones.

        keeper: True: this rank takes the entries that the merge cuts back into its residual.
        """
        received = self._group.swap(self._message.buffer, to, source)
        self._rounds += 1
        if received is None:
            return
        with stage("decode"):
            pair = torch.stack([self._message.buffer, received])
            (held, partner_entries), usable = self._template.unpack_all(pair)
            summed = add_sparse(held, partner_entries)
        with stage("compress"):
            chosen = keep_largest(summed, held.capacity)
        with stage("encode"):
            template = self._template
            self._message = encode(
                chosen, usable, template.encoding, noise=self._noise(template.noise)
            )
            self._sets.append(chosen.indices)
            if to is None:
                self._watched.append(partner_entries)
            # Only one rank of the merged group keeps the cut, or it would be sent twice.
            if keeper:
                self._cuts.append(subtract_sparse(summed, self._message.delivered))

    def _noise(self, noise: Noise | None) -> Noise | None:
        """Return the same bits for all ranks that merge the same entries; other bits each round."""
        return None if noise is None else replace(noise, rank=self._group.size + self._rounds)

    def hand_back(self, to: int | None, source: int | None) -> Tensor:
        """Return the result: sent to the rank that folded in, or received from the other side."""
        received = self._group.swap(self._message.buffer, to, source)
        return self._message.buffer if received is None else received

    def contribution(self) -> Sparse:
        """Return the entries that this rank chose, less the entries that its merges cut."""
        contribution = self._template.delivered
        for cut in self._cuts:
            contribution = subtract_sparse(contribution, cut)
        return contribution

    def as_published(self, result: Sparse) -> tuple[Sparse, Tensor]:
        """Return this rank's entries in the result, and the energy of the lost and of the chosen
        ones.

        The published residual keeps only entries that are not in the result. An entry is lost if it
        is in the result, but was missing from a set on the way. A rank that folds in sees no sets,
        so the rank that takes it in counts for both.
        """
        leaked = torch.zeros(2, dtype=torch.float64, device=result.indices.device)
        for chosen in self._watched if self._sets else ():
            present = surviving = restrict_to(chosen, result.indices)
            for indices in self._sets:
                surviving = restrict_to(surviving, indices)
            leaked += torch.stack([_energy(present) - _energy(surviving), _energy(chosen)])
        return restrict_to(self._watched[0], result.indices), leaked


def _energy(sparse: Sparse) -> Tensor:
    return sparse.values.double().square().sum()


def gtopk_check(merge: str = "lossless") -> None:
    """Raise ConfigError for a merge that does not exist."""
    if merge not in _MERGES:
        raise unknown("merge of gtopk", merge, _MERGES)


def gtopk_rounds(ranks: int, **options: Any) -> int:
    """Return the rounds: log2 P, and two more if P is not a power of two."""
    rounds, power = doubling_rounds(ranks)
    return rounds + (2 if ranks > power else 0)


def gtopk_bytes(ranks: int, size: int, capacity: int, encoding: Encoding, **options: Any) -> int:
    """Return the most bytes that leave one rank: a message in each of log2 P rounds.

    If P is not a power of two, there is one message more, to hand back the result.
    """
    rounds, power = doubling_rounds(ranks)
    return nbytes(capacity, encoding, size) * (rounds + (1 if ranks > power else 0))


def gtopk_legs(network: "Network", size: int, capacity: int, encoding: Encoding) -> "list[Leg]":
    """Return the legs: in each round a swap with a partner twice as far away."""
    message_bytes = nbytes(capacity, encoding, size)
    rounds, power = doubling_rounds(network.workers)
    swaps = [network.pairs(message_bytes, 1 << r) for r in range(rounds)]
    if network.workers > power:
        # A rank that takes in another sends nothing in the first round. In the last it hands back.
        swaps += [network.pairs(0, power), network.pairs(message_bytes, power)]
    return swaps


def gtopk_received(received: "Received") -> float:
    """Return the nanoseconds: each merge adds, selects, encodes, and subtracts the cut entries."""
    return (
        _merges(received.ranks) * 2 * received.k * (received.read + 10 * received.merge)
        + received.k * received.add
    )


def gtopk_work(usual: "Work", task: "LocalTask") -> "Work":
    """Return the work, with a time for each merge however small the merge is."""
    return replace(usual, decode=usual.decode + _merges(task.ranks) * task.merging)


def _merges(ranks: int) -> int:
    """Return the rounds of a tree, and one before if the ranks are not a power of two."""
    return ranks.bit_length() - 1 + (ranks & (ranks - 1) > 0)


EXCHANGE = Exchange(
    gtopk,
    gtopk_bytes,
    gtopk_rounds,
    check=gtopk_check,
    stochastic=True,
    legs=gtopk_legs,
    received=gtopk_received,
    work=gtopk_work,
    preference=1,
)
