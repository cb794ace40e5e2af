"""Where the winners of a selection ended: what lets the next scan clear them on its way."""

import torch
from torch import Tensor


class Edge:
    """Winners were the entries of larger magnitude than the edge, and of those that equal it the
    first: `words`, on the device, holds the edge as bits, the index of the last winner among
    equals, and whether the bound of the last selection let far more than the winners pass.

    A residual that still holds what was chosen, and delivered just as it was, then needs no list of
    indices to be settled: the scan that reads it anyway puts zeros there.
    """

    def __init__(self, device: torch.device) -> None:
        self.words = torch.zeros(3, dtype=torch.int32, device=device)
        self._chosen: tuple[Tensor, Tensor] | None = None

    def chose(self, indices: Tensor, values: Tensor) -> None:
        """The words belong to these winners now."""
        self._chosen = (indices, values)

    def explains(self, indices: Tensor | None, values: Tensor | None) -> bool:
        """Whether just these were chosen last, with these values."""
        mine = self._chosen
        return mine is not None and indices is mine[0] and values is mine[1]
