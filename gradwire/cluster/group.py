"""What an exchange may ask of the ranks, and the ranks of torch.distributed."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.cluster.communicator import give_back, take
from gradwire.cluster.roll import roll_call, sign
from gradwire.errors import ExchangeError
from gradwire.stages import stage

Collective = Callable[..., Any]
Moves = Sequence[tuple[Tensor, int]]
"""Tensors, and the rank each goes to or comes from."""

LARGE = 1 << 16
"""Bytes for one rank from which on those for several are sent one after the other."""

# torch 2.13 renamed it and warns of the old name; 2.11 has only that.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Group(Protocol):
    """P ranks that call the same operations in the same order."""

    rank: int
    size: int
    bytes_sent: int
    """What has left this rank so far, with the ring algorithms that Gloo and NCCL use."""
    rounds: int
    """How often this rank had to wait for another so far, with the same algorithms."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[size, n]: every rank's flat tensor, in rank order. Sends n (P - 1) in P - 1 rounds."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place, the same bits on every rank.

        Sends 2 n (P - 1) / P in 2 (P - 1) rounds.
        """
        ...

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """[size, n]: row p is what rank p has in this rank's row. Sends n (P - 1), P - 1 rounds."""
        ...

    def swap(self, tensor: Tensor, to: int | None, source: int | None) -> Tensor | None:
        """What `source` sent here in this round, while `tensor` goes `to`; None for nobody.

        Every rank calls it in every round. All tensors of a round have one shape and dtype.
        """
        ...

    def split(self, local: int) -> "tuple[Group, Group]":
        """The group cut into blocks of `local` ranks: this rank's block, and the ranks that have
        its place in the other blocks. The first call is collective; what they send counts here.
        """
        ...


@contextlib.contextmanager
def uncounted(group: Group) -> Iterator[None]:
    """What is sent meanwhile is not counted: statistics are of gradients."""
    before = group.bytes_sent, group.rounds
    try:
        yield
    finally:
        group.bytes_sent, group.rounds = before


class DistributedGroup:
    """The ranks of a torch.distributed process group."""

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        device: torch.device,
        timeout: timedelta | None = None,
        parent: "DistributedGroup | None" = None,
    ) -> None:
        self.process_group = process_group
        self.timeout = timeout
        self._parent = parent
        self._splits: dict[int, tuple[DistributedGroup, DistributedGroup]] = {}
        self.device = device
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        self.bytes_sent = self.rounds = 0
        backend = process_group._get_backend(device).name()
        self.on_stream = device.type == "cuda" and backend == "nccl"
        """Whether collectives are enqueued on the device's stream instead of blocking the host."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        out = tensor.new_empty(self.size, tensor.numel())
        with stage("exchange"):
            if self.size == 2 and not self.on_stream:
                self._trade("all-gather", tensor.view(-1).expand(2, -1), out)
            else:
                self._call("all-gather", tensor, _all_gather, out.view(-1), tensor)
        self._count((self.size - 1) * tensor.nbytes, self.size - 1)
        return out

    def all_reduce(self, tensor: Tensor) -> Tensor:
        with stage("exchange"):
            self._call("all-reduce", tensor, dist.all_reduce, tensor)
        self._count(2 * (self.size - 1) * tensor.nbytes // self.size, 2 * (self.size - 1))
        return tensor

    def all_to_all(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        out = torch.empty_like(tensor)
        with stage("exchange"):
            if self.on_stream:
                self._call("all-to-all", tensor, dist.all_to_all_single, out, tensor)
            else:
                self._trade("all-to-all", tensor, out)
        self._count((self.size - 1) * tensor.nbytes // self.size, self.size - 1)
        return out

    def swap(self, tensor: Tensor, to: int | None, source: int | None) -> Tensor | None:
        out = torch.empty_like(tensor)
        sent = [] if to is None else [(tensor, to)]
        received = [] if source is None else [(out, source)]
        with stage("exchange"):
            self._send_receive("swap", tensor, sent, received)
        self._count(0 if to is None else tensor.nbytes, 1 if sent or received else 0)
        return out if source is not None else None

    def _trade(self, name: str, rows: Tensor, out: Tensor) -> None:
        """Row p of `rows` to rank p, and what rank p has for this one into row p of `out`.

        Large rows go one by one, to the next rank, the next but one, and so on: connections that
        share a link hinder each other, and take up to half as long again.
        """
        out[self.rank] = rows[self.rank]
        steps = range(1, self.size)
        for turn in [[step] for step in steps] if rows[0].nbytes >= LARGE else [steps]:
            to = [(self.rank + step) % self.size for step in turn]
            source = [(self.rank - step) % self.size for step in turn]
            sent, received = [(rows[p], p) for p in to], [(out[p], p) for p in source]
            self._send_receive(name, rows, sent, received)

    def _send_receive(self, name: str, tensor: Tensor, sent: Moves, received: Moves) -> None:
        """Tensors to and from ranks, all at once. Gloo sends memory of the host only."""
        if self.on_stream or self.device.type == "cpu":
            self._call(name, tensor, _swap, self._peers(sent), self._peers(received))
            return
        here = [(torch.empty_like(place, device="cpu"), rank) for place, rank in received]
        there = [(part.cpu(), rank) for part, rank in sent]
        self._call(name, tensor, _swap, self._peers(there), self._peers(here))
        for (place, _), (arrived, _) in zip(received, here, strict=True):
            place.copy_(arrived)

    def _peers(self, moves: Moves) -> Moves:
        """The same with ranks of the whole job."""
        ranks = dist.get_process_group_ranks(self.process_group)
        return [(tensor, ranks[rank]) for tensor, rank in moves]

    def split(self, local: int) -> "tuple[DistributedGroup, DistributedGroup]":
        if local not in self._splits:
            with uncounted(self):
                self.agree("split", local=local)
            self._splits[local] = (
                self._sub(range(self.rank // local * local, (self.rank // local + 1) * local)),
                self._sub(range(self.rank % local, self.size, local)),
            )
        return self._splits[local]

    def _sub(self, members: range) -> "DistributedGroup":
        peers = dist.get_process_group_ranks(self.process_group)
        own = take([peers[m] for m in members], self.timeout)
        return DistributedGroup(own, self.device, self.timeout, self)

    def release(self, other: dist.ProcessGroup) -> None:
        """Give the communicators back; what is still asked goes over `other`, of the same ranks.

        A collective call. Nobody lets go while another rank is still busy with the last step.
        """
        with uncounted(self):
            self.agree("detach", size=self.size)
        parts = [part for both in self._splits.values() for part in both]
        for group in (*parts, self):
            give_back(group.process_group)
        self._splits, self.process_group = {}, other

    def _count(self, sent: int, rounds: int) -> None:
        self.bytes_sent += sent
        self.rounds += rounds
        if self._parent is not None:
            self._parent._count(sent, rounds)

    def agree(self, what: str, **fields: int) -> None:
        """Raises on every rank, naming rank and field, unless all ranks hold the same numbers.

        Gloo aborts the process when message sizes differ; this small round makes it an error.
        """
        mine = torch.tensor(list(fields.values()), dtype=torch.int64, device=self.device)
        table = self.all_gather(mine).tolist()
        for rank, row in enumerate(table):
            for name, other, own in zip(fields, row, table[0], strict=True):
                if other != own:
                    raise ExchangeError(
                        f"{what}: rank {rank} has {name} {other}, rank 0 has {own}. All ranks must "
                        f"run the same steps and call flush, detach and load together."
                    )

    def give_up(self) -> None:
        """Break the connections, so that peers fail now and not at their timeout; and sign."""
        for part in (group for both in self._splits.values() for group in both):
            part.give_up()
        if self.on_stream or self.size == 1:
            return
        if self._parent is None:
            sign(self.process_group.group_name, self.rank)
        for ahead in range(1, self.size):
            # A receive that times out breaks all connections; from a rank that died it fails
            # at once and breaks none. After the first that works the rest cost nothing.
            peer = (self.rank + ahead) % self.size
            with contextlib.suppress(RuntimeError):
                waiting = dist.irecv(
                    torch.empty(1), group=self.process_group, group_src=peer, tag=0x6777
                )
                if waiting is not None:
                    waiting.wait(timedelta(milliseconds=1))

    def _call(self, name: str, tensor: Tensor, collective: Collective, *args: Any) -> None:
        try:
            collective(*args, group=self.process_group)
        except RuntimeError as error:
            every = self if self._parent is None else self._parent
            every.give_up()
            raise ExchangeError(
                f"rank {every.rank} of {every.size}: {name} of {tensor.nbytes} bytes failed in "
                f"stage exchange. {every._silent()}(torch: {error})"
            ) from error

    def _silent(self) -> str:
        # On a stream peers learn of a failure when NCCL's watchdog does: nobody would have signed.
        if self.on_stream or self.size == 1:
            return ""
        return f"{roll_call(self.process_group.group_name, self.size)} "


def _swap(sent: Moves, received: Moves, group: dist.ProcessGroup) -> None:
    """Receives before sends: Gloo asks for data on the connection that it sends on, and a request
    behind a large message makes the two directions of a link take turns."""
    moves = [dist.P2POp(dist.irecv, tensor, peer, group) for tensor, peer in received]
    moves += [dist.P2POp(dist.isend, tensor, peer, group) for tensor, peer in sent]
    for work in dist.batch_isend_irecv(moves) if moves else ():
        work.wait()
