"""Where the mean of the messages goes, and how it is zeroed while others are at work."""

from collections.abc import Sequence

import torch

from gradwire.kernels.beside import Beside, pays
from gradwire.kernels.pieces import Piece


class Target:
    """A vector of `size + 1`, the last entry spare; or `pieces`, each for the part of the mean that
    begins at its place, and nowhere else.

    The mean is zero nearly everywhere. To write that takes a third of the time of a scan, and needs
    no message: on CUDA, where there are many, a stream of its own does it while entries are chosen
    and exchanged.
    """

    def __init__(self, size: int, device: torch.device, pieces: Sequence[Piece] = ()) -> None:
        self.pieces = pieces
        self.out = None if pieces else torch.empty(size + 1, dtype=torch.float32, device=device)
        self.size, self.device = size, device
        self.zeroed = False
        self._beside: Beside[None] | None = None

    def clear(self) -> None:
        """Have it zeroed, if that pays; who writes to it next calls `wait` and looks at `zeroed`.

        What the current stream has enqueued so far may still read it.
        """
        if pays(self.size, self.device):
            self._beside = Beside("zero", self.device, self.zero)

    def zero(self) -> None:
        """Zero it on the current stream, by the kernel."""
        from gradwire.kernels.target_triton import zero_triton

        zero_triton(self)
        self.zeroed = True

    def wait(self) -> None:
        """What the current stream does next finds it cleared, if it was."""
        if self._beside is not None:
            self._beside.result()
