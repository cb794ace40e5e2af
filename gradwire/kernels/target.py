"""Where the mean of the messages goes, and how it is zeroed while others are at work."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

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
        self.size, self.device = size, device
        self.zeroed = False
        self._beside: Beside[None] | None = None

    @cached_property
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
