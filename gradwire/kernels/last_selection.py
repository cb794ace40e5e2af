"""What a bundle's scan and its selection tell each other on the device."""

import torch
from torch import Tensor

COUNTS = 1024 + 128


class Edge:
    """Where the winners of a selection ended, and how large group maxima and entries of a scan are.

    Winners were the entries of larger magnitude than the edge, and of those that equal it the
    first: `words`, on the device, holds the edge as bits, the index of the last winner among
    equals, and whether the bound of the last selection let far more than the winners pass.

    A residual that still holds what was chosen, and delivered just as it was, then needs no list of
    indices to be settled: the scan that reads it anyway puts zeros there. `counts` is what the scan
    counts for the selection after it; see `counts_triton`.
    """

    def __init__(self, device: torch.device) -> None:
        self.words = torch.zeros(3, dtype=torch.int32, device=device)
        self.counts = torch.zeros(COUNTS, dtype=torch.int32, device=device)
        self._counted = False
        self._chosen: tuple[Tensor, Tensor] | None = None

    def counting(self) -> Tensor | None:
        """The counts, all zero, for a scan that begins; None while no edge says where to count."""
        if self._chosen is None:
            return None
        if self._counted:
            self.counts.zero_()
        self._counted = True
        return self.counts

    @property
    def has_counts(self) -> bool:
        """Whether the last scan has counted for a selection that is still to come."""
        return self._counted

    def counted(self) -> Tensor | None:
        """What the last scan counted, for one selection, which leaves zeros; None if it is gone."""
        if not self._counted:
            return None
        self._counted = False
        return self.counts

    def chose(self, indices: Tensor, values: Tensor) -> None:
        """The words belong to these winners now."""
        self._chosen = (indices, values)

    def explains(self, indices: Tensor | None, values: Tensor | None) -> bool:
        """Whether just these were chosen last, with these values."""
        mine = self._chosen
        return mine is not None and indices is mine[0] and values is mine[1]
