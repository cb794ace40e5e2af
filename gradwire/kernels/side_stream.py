"""Streams beside the current one, the zeroed mean, and memory that crosses streams."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from gradwire.kernels.dispatch import uses_triton
from gradwire.kernels.pieces import Piece
from gradwire.torch_internals import copy_each

LARGE = 1 << 25
"""Entries from which a side stream saves time: the host pays two events for it."""

T = TypeVar("T")


class SideStream(Generic[T]):
    """Work on a stream beside the current one; each purpose has one side stream.

    The work begins when everything that the current stream has enqueued is done. Memory that was
    allocated and freed there is then no longer in use.
    urgent: use a high-priority stream, so that these kernels do not queue behind a large launch.
    """

    def __init__(
        self, purpose: str, device: torch.device, work: Callable[[], T], urgent: bool = False
    ) -> None:
        here = torch.cuda.current_stream(device)
        side, fork, self._ready = _stream_and_events(here, purpose, urgent)
        self._device = device
        fork.record(here)
        side.wait_event(fork)
        torch.cuda.set_stream(side)
        try:
            self._result = work()
        finally:
            torch.cuda.set_stream(here)
        self._ready.record(side)

    def result(self) -> T:
        """Return the result of `work`; the current stream waits until the work is done."""
        torch.cuda.current_stream(self._device).wait_event(self._ready)
        return self._result


def side_stream_pays(size: int, device: torch.device) -> bool:
    """Return True if a vector of `size` takes so long that a side stream saves time."""
    return size >= LARGE and device.type == "cuda" and uses_triton(device)


@functools.cache
def _stream_and_events(
    current: torch.cuda.Stream, purpose: str, urgent: bool
) -> tuple[torch.cuda.Stream, torch.cuda.Event, torch.cuda.Event]:
    """Return the side stream, and the two events of parting and meeting.

    They are made once and used again. A wait for an event waits for its last record.
    """
    stream = torch.cuda.Stream(current.device, priority=-1 if urgent else 0)
    return stream, torch.cuda.Event(), torch.cuda.Event()


class Target:
    """The place of a mean: a vector of `size + 1`, the last entry spare, or `pieces`.

    Each piece takes the part of the mean that begins at its place. The mean is zero nearly
    everywhere. Writing the zeros takes a third of the time of a scan, and needs no message. For
    large vectors on CUDA a side stream writes them while entries are chosen and exchanged.
    """

    def __init__(self, size: int, device: torch.device, pieces: Sequence[Piece] = ()) -> None:
        self.pieces = pieces
        self.size, self.device = size, device
        self.zeroed = False
        self._clearing: SideStream[None] | None = None

    @functools.cached_property
    def out(self) -> Tensor | None:
        """The vector, made on first use; None if there are pieces."""
        if self.pieces:
            return None
        return torch.empty(self.size + 1, dtype=torch.float32, device=self.device)

    @property
    def vector(self) -> Tensor:
        """The vector. There must be no pieces."""
        assert self.out is not None, "this mean is in pieces"
        return self.out

    def put(self, mean: Tensor) -> None:
        """Take a finished mean: as the vector, or copied into the pieces."""
        if self.pieces:
            parts = [mean[place : place + piece.numel()] for place, piece in self.pieces]
            # One launch on CUDA for any number of pieces.
            copy_each([piece for _, piece in self.pieces], parts)
        else:
            self.out = mean

    def clear(self) -> None:
        """Zero the target on a side stream, if that saves time.

        The next writer calls `wait` and reads `zeroed`. Work that the current stream has already
        enqueued may still read the target.
        """
        if side_stream_pays(self.size, self.device):
            self._clearing = SideStream("zero", self.device, self.zero)

    def zero(self) -> None:
        """Zero the target on the current stream, by the kernel."""
        from gradwire.kernels.triton.target import zero_triton

        zero_triton(self)
        self.zeroed = True

    def wait(self) -> None:
        """Make the current stream wait for the zeros, if `clear` began to write them."""
        if self._clearing is not None:
            self._clearing.result()


def keep_for_stream(owner: Any, device: torch.device) -> None:
    """Delay the reuse of memory that `owner` holds until the current stream is done with it.

    PyTorch returns freed memory at once to the stream that allocated it. `attach` or a checkpoint
    makes tensors on the user's stream. A step drops them on a stream of its own. Without this call
    the backward pass could overwrite them before they are read.
    """
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        for tensor in tensors_in(owner):
            if tensor.is_cuda:
                tensor.record_stream(stream)


def tensors_in(thing: Any) -> Iterator[Tensor]:
    """Yield the tensors in containers and in objects of this package, at any depth."""
    if isinstance(thing, Tensor):
        yield thing
        return
    inside: list[Any] = []
    if isinstance(thing, Mapping):
        inside += thing.values()
    elif isinstance(thing, list | tuple):
        inside += thing
    if type(thing).__module__.startswith("gradwire."):
        inside += vars(thing).values()
    for part in inside:
        yield from tensors_in(part)
