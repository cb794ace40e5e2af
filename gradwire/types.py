"""The few types that travel along the path."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gradwire.kernels.last_selection import LastSelection
    from gradwire.kernels.side_stream import SideStream

ALIGN = 64
"""Every parameter's slot in a bundle starts at a multiple of this many entries, so that a group of
entries never spans two parameters and their gradients may arrive in separate pieces."""

MAX_SIZE = 2**31 - 1
"""Entries in one bundle: indices travel as int32."""


@dataclass(frozen=True)
class Registered:
    """A function under a name that users give, with keyword-only arguments as its options."""

    run: Callable[..., Any]

    @property
    def name(self) -> str:
        return self.run.__name__.replace("_", "-")

    @property
    def summary(self) -> str:
        """The first line of the function's docstring, for `gradwire methods`."""
        return (inspect.getdoc(self.run) or "").splitlines()[0]

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """The keyword-only arguments of the function, with their defaults."""
        parameters = inspect.signature(self.run).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def align(n: int) -> int:
    """`n` rounded up to a whole number of slots."""
    return -(-n // ALIGN) * ALIGN


@dataclass(frozen=True)
class Sparse:
    """Chosen entries of a flat vector of `size` entries.

    `indices` (int32) are unique and ascending; the first `count` are real, the rest is padding with
    index = size and value = 0. `count` is a 0-d tensor on the device, so that no stage has to ask
    the host. `common` says that every rank holds the same indices, which then need not travel.
    """

    indices: Tensor
    values: Tensor
    count: Tensor
    size: int
    common: bool = False

    @property
    def capacity(self) -> int:
        return self.indices.numel()

    def trim(self) -> "Sparse":
        """The same entries without padding. Asks the host for the count."""
        n = int(self.count)
        return Sparse(self.indices[:n], self.values[:n], self.count, self.size, self.common)

    def dense(self) -> Tensor:
        """The vector of `size` entries, zero where nothing was chosen."""
        out = self.values.new_zeros(self.size + 1)
        out[self.indices.long()] = self.values
        return out[: self.size]


def padding(capacity: int, u: Tensor) -> Sparse:
    """No entries of u, with room for `capacity`."""
    indices = torch.full((capacity,), u.numel(), dtype=torch.int32, device=u.device)
    count = torch.zeros((), dtype=torch.int32, device=u.device)
    return Sparse(indices, u.new_zeros(capacity), count, u.numel())


@dataclass(frozen=True)
class Scan:
    """What one pass over u learned, for the methods that can use it.

    `maxima[j]` is max |u| over entries [j * block, (j + 1) * block), as int16 the 16 bits after its
    sign. `finite` is a 0-d bool tensor, True if every gradient entry that came in was finite.
    `edge` is to be told where the winners of this step end.
    """

    finite: Tensor
    maxima: Tensor | None = None
    block: int = 0
    edge: "LastSelection | None" = None


class Memory(dict[str, Tensor]):
    """What a method remembers of one bundle between steps, and for whom it works.

    The tensors are checkpointed; `rank`, `bundle` and `ranks`, the number of workers, are not
    state, they say who is asking.
    """

    def __init__(self, rank: int = 0, bundle: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.rank = rank
        self.bundle = bundle
        self.ranks = ranks
        self.offsets = [0]
        """Where each parameter begins."""
        self.fixed: dict[str, Tensor] = {}
        """What a method derives from the layout and the number of workers; not checkpointed."""
        self.prefetched: dict[str, SideStream[Any]] = {}
        """Work that a method has begun before u was there; empty when the step is over."""
        self._ends: Tensor | None = None

    def lay_out(self, slots: Sequence["Slot"], device: torch.device) -> None:
        """Note where the slots are, and the padding between them."""
        ends, shifts, total = [], [], 0
        for slot in slots:
            shifts.append(slot.offset - total)
            total += slot.numel
            ends.append(total)
        self.entries = total
        self.offsets = [slot.offset for slot in slots]
        self._ends = torch.tensor(ends, dtype=torch.int64, device=device)
        self._shifts = torch.tensor(shifts, dtype=torch.int64, device=device)

    def real(self, u: Tensor) -> int:
        """How many entries of u are not padding."""
        return u.numel() if self._ends is None else self.entries

    @property
    def places(self) -> tuple[Tensor, ...]:
        """Where the entries that are not padding are, as `kernels.draw` wants to know it."""
        return () if self._ends is None else (self._ends, self._shifts)


@dataclass(frozen=True)
class Everything:
    """All of u left this rank, unchanged."""


@dataclass(frozen=True)
class Rounded:
    """All of u left this rank; receivers see `values`, flat fp32."""

    values: Tensor


@dataclass(frozen=True)
class Entries:
    """Some entries of u left this rank; receivers see the values of `sparse`."""

    sparse: Sparse


Delivered = Everything | Rounded | Entries
"""The part of u that left this rank in a step, as receivers see it: the residual is u less this."""


@dataclass(frozen=True)
class Slot:
    """Where one parameter lives in its bundle."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0
    numel: int = 0
    unit: int = 0
    """Parameters of different units never share a bundle: FSDP2 hands over one unit at a time."""
