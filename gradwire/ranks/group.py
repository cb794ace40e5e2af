"""Ranks as an exchange sees them: five operations, and a check that all ranks agree.

`distributed.py` runs the operations over torch.distributed, `virtual.py` between threads.
"""

import contextlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gradwire.errors import ExchangeError

TOGETHER = (
    "All ranks must run the same steps and call save, load, flush, skip_step, follow_lr and detach "
    "together."
)
NAME, FIELDS = 16, 8
"""A row that ranks compare: bytes for the name of an operation, then the count of numbers.

The last number is the length of the message behind the row.
"""
ROW = NAME + 8 * FIELDS
"""Bytes of a row."""


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
    """The times that this rank had to wait for another rank so far, with the same algorithms."""
    is_broken = False
    """True: a collective has failed, or hangs. No rank may use the communicator again."""

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
        """Send `tensor` to rank `to`, and return the tensor of rank `source`; None means no rank.

        Every rank calls it in every round. All tensors of a round have one shape and dtype.
        """

    @abstractmethod
    def split(self, local: int) -> "tuple[Group, Group]":
        """Cut the group into blocks of `local` ranks.

        Return this rank's block, and the ranks at the same place in every block. The first call
        is collective. Bytes and rounds of the two groups count in this group too.
        """

    def agree(self, operation: str, **fields: float) -> None:
        """Raise on every rank unless all ranks run `operation` with the same numbers.

        The error names a rank and a field. Without this check Gloo would abort the process when
        message sizes differ. A collective call, which sends a name and FIELDS numbers.
        """
        check_equal(operation, self.compare(operation, **fields))

    def agree_soon(self, operation: str, **fields: float) -> None:
        """Agree no later than in the next collective, so that local work can hide the wait."""
        self.agree(operation, **fields)

    def end_agreement(self) -> None:  # noqa: B027
        """End what `agree_soon` began: raise on every rank unless all agree."""

    def compare(self, operation: str, **fields: float) -> list[dict[str, float]]:
        """Return every rank's fields, in rank order.

        Raise on every rank unless all ranks run `operation`. Rows of all operations have one
        length, so that ranks in different operations still exchange rows and see the difference.
        """
        row = torch.frombuffer(bytearray(row_of(operation, fields)), dtype=torch.int64)
        table = self.all_gather(row.to(self.device)).cpu()
        return read_rows([line.numpy().tobytes() for line in table], fields)

    def give_up(self, why: str = "") -> None:  # noqa: B027
        """Release the peers that wait for this rank, after an error. Does nothing by default.

        why: the reason that peers are told if no collective has failed, such as a Ctrl-C.
        """


@contextlib.contextmanager
def uncounted(group: Group) -> Iterator[None]:
    """Keep traffic out of the counts of `group`, because statistics are of gradients only."""
    before = group.bytes_sent, group.rounds
    try:
        yield
    finally:
        group.bytes_sent, group.rounds = before


def row_of(operation: str, fields: Mapping[str, float], message: int = 0) -> bytes:
    """Return the row that ranks compare: the name, the numbers, and the bytes of the message."""
    spare = [0] * (FIELDS - 1 - len(fields))
    bits = (*(_bits(value) for value in fields.values()), *spare, message)
    return struct.pack(f"<{NAME}s{FIELDS}q", operation.encode(), *bits)


def read_rows(rows: Sequence[bytes], like: Mapping[str, float]) -> list[dict[str, float]]:
    """Return the fields in every rank's row; `like` has their names and types.

    Raise unless all rows name one operation.
    """
    if all(row == rows[0] for row in rows):
        return [dict(like)] * len(rows)
    places = [_read_place(row) for row in rows]
    for rank, (name, place) in enumerate(places):
        if name != places[0][0]:
            raise ExchangeError(
                f"rank {rank} is in {place}, rank 0 is in {places[0][1]}. {TOGETHER}"
            )
    tables = []
    for row in rows:
        *numbers, message = struct.unpack_from(f"<{FIELDS}q", row, NAME)
        fields = zip(like.items(), numbers, strict=False)
        table = {name: _from_bits(bits, value) for (name, value), bits in fields}
        # The last, because a difference above explains a difference here.
        tables.append({**table, "message_bytes": message})
    return tables


def check_equal(operation: str, rows: Sequence[Mapping[str, float]]) -> None:
    """Raise unless all ranks have the same fields."""
    for rank, row in enumerate(rows):
        for name, other in row.items():
            if other != rows[0][name]:
                raise ExchangeError(
                    f"{operation}: rank {rank} has {name} {other}, rank 0 has {rows[0][name]}. "
                    f"{TOGETHER}"
                )


def _read_place(row: bytes) -> tuple[bytes, str]:
    """Return the name in a row, and words for the place of its rank: name and step.

    The first number of a row is the step, 0 for none.
    """
    name, step = struct.unpack_from(f"<{NAME}sq", row)
    words = name.rstrip(b"\0").decode(errors="replace")
    return name, f"{words} at step {step}" if step else words


def _bits(value: float) -> int:
    """Return an int unchanged, and a float as the int of its fp64 bits."""
    if isinstance(value, int):
        return value
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return int(bits)


def _from_bits(bits: int, like: float) -> float:
    """Return the number that `_bits` wrote; `like` has its type."""
    if isinstance(like, int):
        return bits
    (number,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(number)
