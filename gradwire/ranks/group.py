"""What an exchange may ask of the ranks, and the ranks of torch.distributed."""

import contextlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.errors import ExchangeError
from gradwire.ranks.communicator import give_back, take
from gradwire.ranks.liveness import roll_call, sign
from gradwire.stages import stage
from gradwire.torch_internals import backend_of

Collective = Callable[..., Any]
Moves = Sequence[tuple[Tensor, int]]
"""Tensors, and the rank each goes to or comes from."""

LARGE = 1 << 16
"""Bytes for one rank from which on those for several are sent one after the other."""

TOGETHER = (
    "All ranks must run the same steps and call save, load, flush, skip_step, follow_lr and detach "
    "together."
)
NAME, FIELDS = 16, 7
"""Bytes of an operation's name in a row that ranks compare, and the numbers that follow it."""

# torch 2.13 renamed it and warns of the old name; 2.11 has only that.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Group(ABC):
    """P ranks that call the same operations in the same order."""

    rank: int
    size: int
    on_stream: bool
    """True: collectives are enqueued on the device's stream and do not block the host."""
    device: torch.device
    bytes_sent: int
    """The bytes that have left this rank so far, with the ring algorithms of Gloo and NCCL."""
    rounds: int
    """How often this rank had to wait for another so far, with the same algorithms."""
    is_broken = False
    """True: a collective has failed, or hangs. Nobody may use the communicator again."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return [size, n], every rank's flat tensor, in rank order.

        Sends n (P - 1) in P - 1 rounds.
        """

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Add up over ranks, in place, to the same bits on every rank.

        Sends 2 n (P - 1) / P in 2 (P - 1) rounds.
        """

    @abstractmethod
    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Return [size, n], where row p is what rank p has in this rank's row.

        Sends n (P - 1) in P - 1 rounds.
        """

    @abstractmethod
    def swap(self, tensor: Tensor, to: int | None, source: int | None) -> Tensor | None:
        """Send `tensor` to rank `to`, and return what rank `source` sent; None stands for nobody.

        Every rank calls it in every round. All tensors of a round have one shape and dtype.
        """

    @abstractmethod
    def split(self, local: int) -> "tuple[Group, Group]":
        """Cut the group into blocks of `local` ranks.

        Return this rank's block, and the ranks that have its place in the other blocks. The first
        call is collective. What the two groups send counts here.
        """

    def agree(self, what: str, **fields: float) -> None:
        """Raise on every rank, naming rank and field, unless all are in `what` with these numbers.

        Gloo aborts the process when message sizes differ; this small round makes it an error. A
        collective call; it sends FIELDS numbers and a name.
        """
        rows = self.compare(what, **fields)
        for rank, row in enumerate(rows):
            for name, other in row.items():
                if other != rows[0][name]:
                    raise ExchangeError(
                        f"{what}: rank {rank} has {name} {other}, rank 0 has {rows[0][name]}. "
                        f"{TOGETHER}"
                    )

    def compare(self, what: str, **fields: float) -> list[dict[str, float]]:
        """Return every rank's fields, in rank order; raise on every rank unless all are in `what`.

        All rows have one length, whatever they say: ranks that are out of step meet, and find out.
        """
        row = struct.pack(
            f"<{NAME}s{FIELDS}q",
            what.encode(),
            *(_bits(value) for value in fields.values()),
            *[0] * (FIELDS - len(fields)),
        )
        words = torch.frombuffer(bytearray(row), dtype=torch.int64).to(self.device)
        table = self.all_gather(words).cpu()
        places = [_place(row.numpy().tobytes()) for row in table]
        for rank, (name, place) in enumerate(places):
            if name != places[0][0]:
                raise ExchangeError(
                    f"rank {rank} is in {place}, rank 0 is in {places[0][1]}. {TOGETHER}"
                )
        return [
            {
                name: _number(bits, value)
                for (name, value), bits in zip(fields.items(), numbers, strict=False)
            }
            for numbers in table[:, NAME // 8 :].tolist()
        ]

    def give_up(self) -> None:  # noqa: B027
        """Release the peers that wait for this rank, after an error. Nothing to do by default."""


@contextlib.contextmanager
def uncounted(group: Group) -> Iterator[None]:
    """Leave out of the counts what is sent meanwhile: statistics are of gradients."""
    before = group.bytes_sent, group.rounds
    try:
        yield
    finally:
        group.bytes_sent, group.rounds = before


def _place(row: bytes) -> tuple[bytes, str]:
    """The name in a row, and words for where its rank is. The first number is its step."""
    name, step = struct.unpack_from(f"<{NAME}sq", row)
    words = name.rstrip(b"\0").decode(errors="replace")
    return name, f"{words} at step {step}" if step else words


def _bits(value: float) -> int:
    """A whole number as it is, another one by the bits of its fp64."""
    if isinstance(value, int):
        return value
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return int(bits)


def _number(bits: int, like: float) -> float:
    if isinstance(like, int):
        return bits
    (number,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(number)


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
        """The communicator that `leave` gives back; None where it was given back."""
        self.on_stream = device.type == "cuda" and enqueues(process_group, device)

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
        own = take([peers[m] for m in members], self.timeout, self)
        return DistributedGroup(own, self.device, self.timeout, self)

    def leave(self, other: dist.ProcessGroup | None) -> None:
        """Give the communicators back; what is still asked goes over `other`, of the same ranks.

        Not a collective call: `take` hands out only what every rank has given back.
        """
        parts = [part for both in self._splits.values() for part in both]
        if self._lent is not None and not self.is_broken:
            for group in (*parts, self):
                give_back(group.process_group)
        self._lent, self._splits = None, {}
        if other is not None:
            self.process_group = other

    def _count(self, sent: int, rounds: int) -> None:
        self.bytes_sent += sent
        self.rounds += rounds
        if self._parent is not None:
            self._parent._count(sent, rounds)

    def give_up(self) -> None:
        """Break the connections, so that peers fail now and not at their timeout; and sign."""
        self.is_broken = True
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
                    torch.empty(1, dtype=torch.float32),
                    group=self.process_group,
                    group_src=peer,
                    tag=0x6777,
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
