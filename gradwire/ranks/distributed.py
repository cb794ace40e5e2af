"""The ranks of a torch.distributed process group.

Collectives are torch's. On Gloo, an all-gather between two ranks and every all-to-all go as
point-to-point messages instead.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.errors import ExchangeError
from gradwire.ranks.communicator import give_back_communicator, take_communicator
from gradwire.ranks.group import ROW, Group, check_equal, read_rows, row_of, uncounted
from gradwire.ranks.liveness import explain_stop, roll_call, sign_stopped
from gradwire.stages import stage
from gradwire.torch_internals import backend_of

if TYPE_CHECKING:
    from gradwire.ranks.mailbox import Mailbox

_Collective = Callable[..., Any]
_Moves = Sequence[tuple[Tensor, int]]
"""Tensors, each with the rank that it goes to or comes from."""

LARGE = 1 << 16
"""Bytes per row from which on rows for several ranks are sent one after the other."""

# torch 2.13 renamed the function and warns of the old name. torch 2.11 has only the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def enqueues(process_group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if the group's backend enqueues collectives on the stream of `device`."""
    # No backend says so itself. Only a backend that enqueues can join collectives into one launch:
    # nccl, nccl2 and nccl-lazy can, Gloo cannot, and a wrapper answers for what it wraps.
    # torch asks the same before it joins sends and receives. Names say nothing: anybody can
    # register a backend under any name.
    return bool(getattr(backend_of(process_group, device), "supports_coalescing", False))


class DistributedGroup(Group):
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
        self._lent: dist.ProcessGroup | None = process_group
        """The communicator that `leave` gives back; None once it was given back."""
        self.on_stream = device.type == "cuda" and enqueues(process_group, device)
        self._mailbox: Mailbox | None = None
        self._agreement: _Comparison | None = None
        """What `agree_soon` began, until the next collective."""

    def open_mailbox(self) -> None:
        """Compare rows by posted receives from now on, if the backend can. All ranks call it."""
        if not self.on_stream:
            from gradwire.ranks.mailbox import mailbox_of

            self._mailbox = mailbox_of(self.process_group, self.rank, self.size)

    def compare(self, operation: str, **fields: float) -> list[dict[str, float]]:
        self.end_agreement()
        if self._mailbox is None:
            return super().compare(operation, **fields)
        begun = self._begin(operation, fields)
        with stage("exchange"):
            self._send_row(begun)
            return self._take_rows(begun)

    def agree_soon(self, operation: str, **fields: float) -> None:
        """Agree in the next collective: with two ranks a small message goes with the row."""
        if self._mailbox is None:
            return self.agree(operation, **fields)
        self.end_agreement()
        begun = self._begin(operation, fields)
        if self.size > 2:
            with stage("exchange"):
                self._send_row(begun)
        self._agreement = begun

    def end_agreement(self) -> None:
        with stage("exchange"):
            self._end_agreement()

    def _end_agreement(self) -> None:
        if self._agreement is not None:
            begun, self._agreement = self._agreement, None
            if not begun.is_sent:
                self._send_row(begun)
            check_equal(begun.operation, self._take_rows(begun))

    def _begin(self, operation: str, fields: Mapping[str, float]) -> "_Comparison":
        """Return a comparison, counted here: the caller may not want it in the counts."""
        self._count(ROW * (self.size - 1), self.size - 1)
        return _Comparison(operation, fields)

    def _send_row(self, begun: "_Comparison", message: np.ndarray | None = None) -> None:
        """Send this rank's row straight to every rank, because a ring would take P - 1 turns."""
        assert self._mailbox is not None
        begun.is_sent = True
        length = 0 if message is None else message.nbytes
        row = row_of(begun.operation, begun.fields, length)
        self._call(begun.name, begun.nbytes, self._mailbox.send, row, message)

    def _take_rows(
        self, begun: "_Comparison", arrival: np.ndarray | None = None
    ) -> list[dict[str, float]]:
        """Return every rank's row; `arrival` takes the message of the other one of two ranks."""
        assert self._mailbox is not None
        rows = self._call(begun.name, begun.nbytes, self._mailbox.receive)
        try:
            table = read_rows(rows, begun.fields)
            if arrival is not None:
                check_equal(begun.operation, table)
                arrival[:] = self._mailbox.message(1 - self.rank, arrival.nbytes)
        finally:
            self._mailbox.post(self.process_group)
        return table

    def _swap_with_row(self, name: str, tensor: Tensor, sent: Tensor, received: Tensor) -> bool:
        """Swap small tensors of two ranks together with the row that is due; False if none is.

        sent, received: in host memory, contiguous and of one length.
        """
        begun = self._agreement
        if begun is None or begun.is_sent or self._mailbox is None:
            return False
        fits = sent.nbytes == received.nbytes <= self._mailbox.room
        if not fits or not sent.is_contiguous():
            return False
        self._agreement = None
        begun.name, begun.nbytes = name, tensor.nbytes
        self._send_row(begun, as_bytes(sent))
        self._take_rows(begun, as_bytes(received))
        return True

    def all_gather(self, tensor: Tensor) -> Tensor:
        out = tensor.new_empty(self.size, tensor.numel())
        with stage("exchange"):
            if self.size == 2 and not self.on_stream:
                self._trade("all-gather", tensor.view(-1).expand(2, -1), out)
            else:
                self._call("all-gather", tensor.nbytes, _all_gather, out.view(-1), tensor)
        self._count((self.size - 1) * tensor.nbytes, self.size - 1)
        return out

    def all_reduce(self, tensor: Tensor) -> Tensor:
        with stage("exchange"):
            self._call("all-reduce", tensor.nbytes, dist.all_reduce, tensor)
        self._count(2 * (self.size - 1) * tensor.nbytes // self.size, 2 * (self.size - 1))
        return tensor

    def all_to_all(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        out = torch.empty_like(tensor)
        with stage("exchange"):
            if self.on_stream:
                self._call("all-to-all", tensor.nbytes, dist.all_to_all_single, out, tensor)
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
        """Send row p of `rows` to rank p, and receive row p of `out` from rank p."""
        out[self.rank] = rows[self.rank]
        distances = range(1, self.size)
        # Large rows go one by one. Connections that share a link hinder each other, and together
        # take up to half as long again.
        turns = [[distance] for distance in distances] if rows[0].nbytes >= LARGE else [distances]
        for turn in turns:
            receivers = [(self.rank + distance) % self.size for distance in turn]
            senders = [(self.rank - distance) % self.size for distance in turn]
            sent, received = [(rows[p], p) for p in receivers], [(out[p], p) for p in senders]
            self._send_receive(name, rows, sent, received)

    def _send_receive(self, name: str, tensor: Tensor, sent: _Moves, received: _Moves) -> None:
        """Send and receive these tensors at once. Gloo sends host memory, so it gets copies."""
        if self.on_stream:
            self._call(
                name, tensor.nbytes, _swap_enqueued, self._peers(sent), self._peers(received)
            )
            return
        if self.device.type == "cpu":
            self._swap(name, tensor, sent, received)
            return
        arrivals = [(torch.empty_like(place, device="cpu"), rank) for place, rank in received]
        departures = [(part.cpu(), rank) for part, rank in sent]
        self._swap(name, tensor, departures, arrivals)
        for (place, _), (arrived, _) in zip(received, arrivals, strict=True):
            place.copy_(arrived)

    def _swap(self, name: str, tensor: Tensor, sent: _Moves, received: _Moves) -> None:
        """Send and receive host memory, the message of two ranks with the row that is due."""
        pair = self.size == 2 and sent and received
        if not pair or not self._swap_with_row(name, tensor, sent[0][0], received[0][0]):
            self._call(name, tensor.nbytes, _swap_now, sent, received)

    def _peers(self, moves: _Moves) -> _Moves:
        """Return the moves with each rank as its number in the whole job."""
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
        """Return a group of these ranks of this one. A collective call."""
        peers = dist.get_process_group_ranks(self.process_group)
        communicator = take_communicator([peers[m] for m in members], self.timeout, self)
        return DistributedGroup(communicator, self.device, self.timeout, self)

    def _parts(self) -> "list[DistributedGroup]":
        """Return the groups that `split` has made."""
        return [part for pair in self._splits.values() for part in pair]

    def leave(self, other: dist.ProcessGroup | None) -> None:
        """Give the communicators back, and use `other`, of the same ranks, from now on.

        Not a collective call: a communicator is taken again only when every rank gave it back.
        """
        if self._lent is not None and not self.is_broken:
            for group in (*self._parts(), self):
                give_back_communicator(group.process_group)
        self._lent, self._splits = None, {}
        if other is not None:
            self.process_group, self._mailbox = other, None

    def _count(self, sent: int, rounds: int) -> None:
        """Add to the counts of this group and of every group that it is a part of."""
        self.bytes_sent += sent
        self.rounds += rounds
        if self._parent is not None:
            self._parent._count(sent, rounds)

    def give_up(self, why: str = "") -> None:
        """Break the connections, so that peers fail now instead of at their timeout; then sign."""
        self.is_broken = True
        if why and not self.on_stream:
            explain_stop(self.process_group.group_name, self.rank, why)
        for part in self._parts():
            part.give_up()
        if self.on_stream or self.size == 1:
            return
        if self._parent is None:
            sign_stopped(self.process_group.group_name, self.rank)
        for ahead in range(1, self.size):
            # A receive that times out breaks all connections. A receive from a dead rank fails
            # at once and breaks none, so every peer is tried. Once connections are broken, the
            # other receives fail at once.
            peer = (self.rank + ahead) % self.size
            with contextlib.suppress(RuntimeError):
                waiting = dist.irecv(
                    torch.empty(1, dtype=torch.float32),
                    group=self.process_group,
                    group_src=peer,
                    tag=0x6777,
                )
                if waiting is not None:
                    waiting.wait(timedelta(milliseconds=1))

    def _call(self, name: str, nbytes: int, collective: _Collective, *args: Any) -> Any:
        """Run a collective; raise an ExchangeError that names rank and operation if it fails."""
        whole = self if self._parent is None else self._parent
        whole._end_agreement()
        try:
            return collective(*args, group=self.process_group)
        except RuntimeError as error:
            whole.give_up()
            raise whole.failure(
                f"{name} of {nbytes} bytes failed in stage exchange", error
            ) from error

    def failure(self, what: str, error: Exception) -> ExchangeError:
        """Return an ExchangeError that names this rank, `what` failed, and the silent ranks."""
        return ExchangeError(
            f"rank {self.rank} of {self.size}: {what}. {self._describe_silence()}(torch: {error})"
        )

    def _describe_silence(self) -> str:
        """Return a sentence on the ranks that give no sign of life, "" for a group on a stream."""
        # NCCL's watchdog tells peers of a failure late: no rank would have signed by now.
        if self.on_stream or self.size == 1:
            return ""
        return f"{roll_call(self.process_group.group_name, self.size)} "


@dataclass
class _Comparison:
    """Comparison of rows that has begun."""

    operation: str
    fields: Mapping[str, float]
    name: str = "comparison"
    nbytes: int = ROW
    """The name and the length of what errors say has failed."""
    is_sent: bool = False


def as_bytes(tensor: Tensor) -> np.ndarray:
    """Return the memory of a contiguous tensor as flat uint8."""
    return tensor.view(-1).view(torch.uint8).numpy()


def _swap_now(sent: _Moves, received: _Moves, *, group: dist.ProcessGroup) -> None:
    """Send and receive at once in a group that does not enqueue."""
    # Receives first: Gloo requests data on the connection that it sends on. A request behind a
    # large message would make the two directions of a link take turns.
    works = [dist.irecv(place, group=group, group_src=rank) for place, rank in received]
    works += [dist.isend(part, group=group, group_dst=rank) for part, rank in sent]
    for work in works:
        if work is not None:
            work.wait()


def _swap_enqueued(sent: _Moves, received: _Moves, group: dist.ProcessGroup) -> None:
    """Enqueue all receives and sends as one launch. Ranks are numbers in the whole job."""
    moves = [dist.P2POp(dist.irecv, tensor, peer, group) for tensor, peer in received]
    moves += [dist.P2POp(dist.isend, tensor, peer, group) for tensor, peer in sent]
    for work in dist.batch_isend_irecv(moves) if moves else ():
        work.wait()
