"""The few types that travel along the path."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gradwire.kernels.last_selection import LastSelection
    from gradwire.kernels.side_stream import SideStream

ALIGN = 64
"""Every parameter's slot in a bundle starts at a multiple of this number of entries.

A block of entries then never spans two parameters, and gradients may arrive in separate pieces.
"""

MAX_SIZE = 2**31 - 1
"""The most entries in one bundle, because indices travel as int32."""


@dataclass(frozen=True)
class Registered:
    """Function under a name that users give; its keyword-only arguments are its options."""

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


R = TypeVar("R", bound=Registered)


class Registry(MutableMapping[str, R]):
    """The methods or the exchanges by name, in order; a file is loaded when its name is used.

    So a process that sends top-k entries does not import a dozen other methods.
    """

    def __init__(self, homes: Mapping[str, str]) -> None:
        self._entries: dict[str, R | str] = dict(homes)

    def __getitem__(self, name: str) -> R:
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            loaded: R = getattr(import_module(module), attribute)
            entry = self._entries[name] = loaded
        return entry

    def __setitem__(self, name: str, entry: R) -> None:
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries


def align(n: int) -> int:
    """Return `n` rounded up to a multiple of ALIGN."""
    return -(-n // ALIGN) * ALIGN


@dataclass(frozen=True)
class Sparse:
    """Chosen entries of a flat vector of `size` entries.

    indices: int32, unique and ascending. The first `count` are real; padding follows, with index =
    size and value = 0.
    count: a 0-d tensor on the device, so that no stage must wait for the host.
    common: True: every rank holds the same indices, which then need not travel.
    """

    indices: Tensor
    values: Tensor
    count: Tensor
    size: int
    common: bool = False

    @property
    def capacity(self) -> int:
        """The number of entries including padding."""
        return self.indices.numel()

    def trim(self) -> "Sparse":
        """Return the same entries without padding. The host waits for the count."""
        count = int(self.count)
        return Sparse(self.indices[:count], self.values[:count], self.count, self.size, self.common)

    def dense(self) -> Tensor:
        """Return the vector of `size` entries, zero except for the chosen entries."""
        vector = self.values.new_zeros(self.size + 1)
        vector[self.indices.long()] = self.values
        return vector[: self.size]


def local_of(tensor: Any) -> Any:
    """Return this rank's shard of a DTensor, and anything else as it is."""
    return tensor.to_local() if hasattr(tensor, "placements") else tensor


def empty_sparse(capacity: int, u: Tensor) -> Sparse:
    """Return a Sparse without entries of u, with room for `capacity` entries."""
    indices = torch.full((capacity,), u.numel(), dtype=torch.int32, device=u.device)
    count = torch.zeros((), dtype=torch.int32, device=u.device)
    return Sparse(indices, u.new_zeros(capacity), count, u.numel())


@dataclass(frozen=True)
class Scan:
    """Result of one pass over u, for the methods that can use it.

    finite: True (0-d) if every gradient entry that came in was finite.
    maxima: `maxima[j]` is max |u| over entries [j * block, (j + 1) * block). As int16 it holds the
    16 bits after the sign.
    edge: takes note of the last entry that is chosen in this step.
    """

    finite: Tensor
    maxima: Tensor | None = None
    block: int = 0
    edge: "LastSelection | None" = None


class Memory(dict[str, Tensor]):
    """State of a method or exchange for one bundle, kept between steps.

    The tensors are checkpointed. `rank`, `bundle` and `ranks` (the number of workers) are no state.
    They tell the method for whom it works.
    """

    def __init__(self, rank: int = 0, bundle: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.rank = rank
        self.bundle = bundle
        self.ranks = ranks
        self.offsets = [0]
        """The first entry of each parameter."""
        self.derived: dict[str, Tensor] = {}
        """Tensors that follow from the layout and the number of workers; not checkpointed."""
        self.prefetched: dict[str, SideStream[Any]] = {}
        """Work that a method has begun before u was there; empty at the end of the step."""
        self.longest: Callable[[Tensor], int] = int
        """(0-d count) -> the largest count of all ranks, which the host waits for."""
        self._ends: Tensor | None = None

    def lay_out(self, slots: Sequence["Slot"], device: torch.device) -> None:
        """Note the offsets of the slots, and the padding between them."""
        ends, shifts, total = [], [], 0
        for slot in slots:
            shifts.append(slot.offset - total)
            total += slot.numel
            ends.append(total)
        self.entries = total
        self.offsets = [slot.offset for slot in slots]
        self._ends = torch.tensor(ends, dtype=torch.int64, device=device)
        self._shifts = torch.tensor(shifts, dtype=torch.int64, device=device)

    def real_size(self, u: Tensor) -> int:
        """Return the number of entries of u without padding."""
        return u.numel() if self._ends is None else self.entries

    @property
    def places(self) -> tuple[Tensor, ...]:
        """The parts of u that are not padding, in the form that `kernels.draw` needs."""
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
"""The part of u that left this rank in a step, as receivers see it; u less this is the residual."""


@dataclass(frozen=True)
class Slot:
    """Place of one parameter in its bundle."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0
    numel: int = 0
    unit: int = 0
    """Parameters of different units never share a bundle: FSDP2 hands over one unit at a time."""
