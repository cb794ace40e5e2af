"""Where the mean of the messages goes, and how it is zeroed while others are at work."""

import functools
from collections.abc import Sequence

import torch

from gradwire.kernels.backend import uses_triton
from gradwire.kernels.pieces import Piece

LARGE = 1 << 25
"""Entries from which on zeroing ahead pays: it takes the host two events and a launch."""


class Target:
    """A vector of `size + 1`, the last entry spare; or `pieces`, each for the part of the mean that
    begins at its place, and nowhere else.

    The mean is zero nearly everywhere. To write that takes a third of the time of a scan, and needs
    no message: on CUDA, where there are many, a stream of its own does it while entries are chosen
    and exchanged.
    """

    def __init__(self, size: int, device: torch.device, pieces: Sequence[Piece] = ()) -> None:
        self.pieces = pieces
        self.out = None if pieces else torch.empty(size + 1, device=device)
        self.size, self.device = size, device
        self.zeroed = False
        self._ready: torch.cuda.Event | None = None

    def clear(self) -> None:
        """Have it zeroed, if that pays; who writes to it next calls `wait` and looks at `zeroed`.

        What the current stream has enqueued so far may still read it.
        """
        if self.size < LARGE or self.device.type != "cuda" or not uses_triton(self.device):
            return
        here = torch.cuda.current_stream(self.device)
        side, fork, self._ready = _side(here)
        fork.record(here)
        side.wait_event(fork)
        torch.cuda.set_stream(side)
        try:
            self.zero()
        finally:
            torch.cuda.set_stream(here)
        self._ready.record(side)

    def zero(self) -> None:
        """Zero it on the current stream, by the kernel."""
        from gradwire.kernels.target_triton import zero_triton

        zero_triton(self)
        self.zeroed = True

    def wait(self) -> None:
        """What the current stream does next finds it cleared, if it was."""
        if self._ready is not None:
            torch.cuda.current_stream(self.device).wait_event(self._ready)


@functools.cache
def _side(of: torch.cuda.Stream) -> tuple[torch.cuda.Stream, torch.cuda.Event, torch.cuda.Event]:
    """A stream at the side of another one, and the events of parting and meeting.

    Used again and again: whoever waits for an event waits for what was recorded last.
    """
    return torch.cuda.Stream(of.device), torch.cuda.Event(), torch.cuda.Event()
