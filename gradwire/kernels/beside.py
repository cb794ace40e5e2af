"""Work that may go on while the current stream does something else."""

import functools
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from gradwire.kernels.backend import uses_triton

LARGE = 1 << 25
"""Entries from which on a stream of its own pays: it takes the host two events."""

T = TypeVar("T")


class Beside(Generic[T]):
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
