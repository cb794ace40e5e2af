"""Virtual ranks: P workers in one process that run the same exchange code as real ranks."""

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch
from torch import Tensor

from gradwire.ranks.group import Group
from gradwire.stages import stage

T = TypeVar("T")
_MOST_THREADS = 1 << 20


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Return the threads of all virtual workers, which stay for the next step.

    torch keeps buffers per thread, which new threads would have to make again.
    """
    # The pool starts only as many threads as ever ran at once; the limit just must not bind.
    return ThreadPoolExecutor(_MOST_THREADS, "virtual worker")


if hasattr(os, "register_at_fork"):
    # A forked child has no threads, so it needs a pool of its own.
    os.register_at_fork(after_in_child=_threads.cache_clear)


class _Meeting:
    """One exchange: the tensors that all ranks offered, in rank order, and the results."""

    def __init__(self) -> None:
        self.offered: list[Tensor] = []
        self._made: dict[tuple[int, ...], Tensor] = {}

    def once(self, members: Sequence[int], make: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Return `make` of these members' tensors, which only the first call computes."""
        key = tuple(members)
        if key not in self._made:
            self._made[key] = make([self.offered[member] for member in members])
        return self._made[key]


class VirtualRanks:
    """P workers that take turns: each runs until it needs the others, then the next one runs.

    Each worker has a thread, but only one runs at a time, in rank order. So results repeat, and
    torch's own threads are not oversubscribed.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.groups = [VirtualGroup(self, rank) for rank in range(size)]
        self._rounds: dict[int, _Meeting] = {}
        self._round = [0] * size
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._failure: BaseException | None = None

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Return [work(rank) for every rank]; all ranks advance together."""
        results: list[T | None] = [None] * self.size
        self._failure = None
        self._rounds.clear()
        self._round = [0] * self.size
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        threads = torch.get_num_threads()

        def worker(rank: int) -> None:
            self._turns[rank].acquire()
            # torch gives every thread the setting that held when the thread began.
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            try:
                if self._failure is None:
                    # A thread begins on the default stream.
                    with torch.cuda.stream(stream):
                        results[rank] = work(rank)
            except BaseException as error:
                self._failure = self._failure or error
            finally:
                self._pass_on(rank)

        running = [_threads().submit(worker, rank) for rank in range(self.size)]
        self._turns[0].release()
        wait(running)
        # The last rank to finish has released a semaphore that no rank waits for.
        self._turns = [threading.Semaphore(0) for _ in range(self.size)]
        if self._failure is not None:
            raise self._failure
        return results  # type: ignore[return-value]

    def _pass_on(self, rank: int) -> None:
        self._turns[(rank + 1) % self.size].release()

    def meet(self, rank: int, tensor: Tensor) -> _Meeting:
        """Offer a tensor, and return the meeting once all ranks have offered theirs."""
        number = self._round[rank]
        self._round[rank] += 1
        meeting = self._rounds.setdefault(number, _Meeting())
        meeting.offered.append(tensor)
        self._pass_on(rank)
        self._turns[rank].acquire()
        if self._failure is not None:
            raise RuntimeError("another virtual worker failed") from self._failure
        if rank == self.size - 1:
            del self._rounds[number]
        return meeting


class VirtualGroup(Group):
    """One virtual worker's view of the others."""

    on_stream = True
    device = torch.device("cpu")
    """The device of rows that ranks compare."""

    def __init__(
        self,
        ranks: VirtualRanks,
        rank: int,
        members: Sequence[int] | None = None,
        parent: "VirtualGroup | None" = None,
    ) -> None:
        self._ranks = ranks
        self._me = rank
        self._members = range(ranks.size) if members is None else members
        self._parent = parent
        self._splits: dict[int, tuple[VirtualGroup, VirtualGroup]] = {}
        self.rank = self._members.index(rank)
        self.size = len(self._members)
        self.bytes_sent = self.rounds = 0

    def all_gather(self, tensor: Tensor) -> Tensor:
        self._count((self.size - 1) * tensor.nbytes, self.size - 1)
        with stage("exchange"):
            # One tensor for all ranks, because no rank writes into a gathered tensor.
            return self._ranks.meet(self._me, tensor).once(self._members, torch.stack)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._count(2 * (self.size - 1) * tensor.nbytes // self.size, 2 * (self.size - 1))
        with stage("exchange"):
            meeting = self._ranks.meet(self._me, tensor)
            return tensor.copy_(meeting.once(self._members, sum_in_order))

    def all_to_all(self, tensor: Tensor) -> Tensor:
        self._count((self.size - 1) * tensor.nbytes // self.size, self.size - 1)
        with stage("exchange"):
            return torch.stack([rows[self.rank] for rows in self._meet(tensor)])

    def swap(self, tensor: Tensor, to: int | None, source: int | None) -> Tensor | None:
        moves = to is not None or source is not None
        self._count(0 if to is None else tensor.nbytes, 1 if moves else 0)
        with stage("exchange"):
            offered = self._meet(tensor)
        return offered[source].clone() if source is not None else None

    def split(self, local: int) -> "tuple[VirtualGroup, VirtualGroup]":
        if local not in self._splits:
            block = range(self.rank // local * local, (self.rank // local + 1) * local)
            across = range(self.rank % local, self.size, local)
            self._splits[local] = (self._sub(block), self._sub(across))
        return self._splits[local]

    def _sub(self, places: range) -> "VirtualGroup":
        """Return the group of the ranks at these places of this group."""
        return VirtualGroup(self._ranks, self._me, [self._members[p] for p in places], self)

    def _count(self, sent: int, rounds: int) -> None:
        """Add to the counts of this group and of every group that it is a part of."""
        self.bytes_sent += sent
        self.rounds += rounds
        if self._parent is not None:
            self._parent._count(sent, rounds)

    def _meet(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of this group's members.

        All ranks meet, also ranks of other groups, because all ranks run the same operations.
        """
        offered = self._ranks.meet(self._me, tensor).offered
        return [offered[member] for member in self._members]


def sum_in_order(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum, added in rank order."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total
