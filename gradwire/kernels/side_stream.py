"""Streams beside the current one: work, the zeroed mean, and memory that crosses over."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from gradwire.kernels.dispatch import uses_triton
from gradwire.kernels.pieces import Piece

LARGE = 1 << 25
"""Entries from which on a stream of its own pays: it takes the host two events."""

T = TypeVar("T")


class SideStream(Generic[T]):
    """Work on a stream at the side of the current one, which has one for each purpose.

    urgent: its kernels go before what waits on the current stream, which otherwise, once a large
    launch has begun there, they would wait for the end of.

    It begins when all that the current stream has enqueued is done: what was allocated there and
    given back is then in use no more.
    """

    def __init__(
        self, purpose: str, device: torch.device, work: Callable[[], T], urgent: bool = False
    ) -> None:
        here = torch.cuda.current_stream(device)
        side, fork, self._ready = _side(here, purpose, urgent)
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
        """What `work` returned; what the current stream does next finds it done."""
        torch.cuda.current_stream(self._device).wait_event(self._ready)
        return self._result


def pays(size: int, device: torch.device) -> bool:
    """Whether a vector of `size` takes so long that other work is worth a stream of its own."""
    return size >= LARGE and device.type == "cuda" and uses_triton(device)


@functools.cache
def _side(
    of: torch.cuda.Stream, purpose: str, urgent: bool
) -> tuple[torch.cuda.Stream, torch.cuda.Event, torch.cuda.Event]:
    """The stream, and the events of parting and meeting.

    Used again and again: whoever waits for an event waits for what was recorded last.
    """
    stream = torch.cuda.Stream(of.device, priority=-1 if urgent else 0)
    return stream, torch.cuda.Event(), torch.cuda.Event()


class Target:
    """A vector of `size + 1`, the last entry spare; or `pieces`, each for the part of the mean that
    begins at its place, and nowhere else.

    The mean is zero nearly everywhere. To write that takes a third of the time of a scan, and needs
    no message: on CUDA, where there are many, a stream of its own does it while entries are chosen
    and exchanged.
    """

    def __init__(self, size: int, device: torch.device, pieces: Sequence[Piece] = ()) -> None:
        self.pieces = pieces
        self.size, self.device = size, device
        self.zeroed = False
        self._beside: SideStream[None] | None = None

    @functools.cached_property
    def out(self) -> Tensor | None:
        """The vector, made when it is first asked for; None where there are pieces."""
        if self.pieces:
            return None
        return torch.empty(self.size + 1, dtype=torch.float32, device=self.device)

    @property
    def vector(self) -> Tensor:
        """The mean, where it is not in pieces."""
        assert self.out is not None, "this mean is in pieces"
        return self.out

    def put(self, mean: Tensor) -> None:
        """Take a mean that is ready: as the vector, or copied into the pieces."""
        if self.pieces:
            parts = [mean[place : place + piece.numel()] for place, piece in self.pieces]
            # One launch on CUDA, however many pieces there are.
            torch._foreach_copy_([piece for _, piece in self.pieces], parts)
        else:
            self.out = mean

    def clear(self) -> None:
        """Have it zeroed, if that pays; who writes to it next calls `wait` and looks at `zeroed`.

        What the current stream has enqueued so far may still read it.
        """
        if pays(self.size, self.device):
            self._beside = SideStream("zero", self.device, self.zero)

    def zero(self) -> None:
        """Zero it on the current stream, by the kernel."""
        from gradwire.kernels.triton.target import zero_triton

        zero_triton(self)
        self.zeroed = True

    def wait(self) -> None:
        """What the current stream does next finds it cleared, if it was."""
        if self._beside is not None:
            self._beside.result()


def keep_for_stream(owner: Any, device: torch.device) -> None:
    """Whenever a tensor that `owner` holds is dropped, its memory waits for the current stream.

    PyTorch gives memory back to the stream that it was made on, at once. What `attach` or a
    checkpoint has made on the user's stream is dropped in a step, which has a stream of its own:
    the backward pass would write over it before it was read.
    """
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        for tensor in tensors_in(owner):
            if tensor.is_cuda:
                tensor.record_stream(stream)


def tensors_in(thing: Any) -> Iterator[Tensor]:
    """The tensors in containers and in objects of this package, however deep."""
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
