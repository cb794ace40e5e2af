"""Streams at the side of others: for work that need not wait, nor be waited for, yet."""

import contextlib
import functools
from collections.abc import Iterator

import torch


class Side:
    """A stream at the side of another one, and the events of parting and meeting.

    Used again and again: whoever waits for an event waits for what was recorded last.
    """

    def __init__(self, of: torch.cuda.Stream, priority: int) -> None:
        self._of, self._stream = of, torch.cuda.Stream(of.device, priority)
        self._fork, self._ready = torch.cuda.Event(), torch.cuda.Event()

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """What is launched here comes after what the other has so far, and beside the rest."""
        self._fork.record(self._of)
        self._stream.wait_event(self._fork)
        torch.cuda.set_stream(self._stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(self._of)
        self._ready.record(self._stream)

    def join(self) -> None:
        """What the current stream does next comes after the work."""
        torch.cuda.current_stream(self._of.device).wait_event(self._ready)


def side(device: torch.device, use: str, priority: int = 0) -> Side:
    """The one at the side of the current stream; each use has its own."""
    return _side(torch.cuda.current_stream(device), use, priority)


@functools.cache
def _side(of: torch.cuda.Stream, use: str, priority: int) -> Side:
    return Side(of, priority)
