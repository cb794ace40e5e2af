"""The notes that a bundle's scan and its selection leave for each other on the device."""

import torch
from torch import Tensor

COUNTS = 1024
"""int32 words of `LastSelection.counts`."""
THRESHOLD, LAST_INDEX, CROWDED = range(3)
"""Places in `LastSelection.record`."""


class LastSelection:
    """The end of the last selection, and the counts of the last scan.

    Winners were the entries of larger magnitude than the threshold. Of the entries that equal the
    threshold, the first ones won, up to the last index. `record`, int32 [3] on the device, holds:

    threshold: the magnitude as bits.
    last_index: the index of the last winner that equals the threshold; -1 if none does.
    crowded: not 0 if the bound of that selection let far more entries pass than the winners.

    The residual may still hold the winners, and they may be delivered unchanged. The next scan then
    settles them without a list of indices. It reads every entry and clears each winner. `counts` is
    filled by a scan for the next selection; see `kernels/triton/select/counts.py`.
    """

    def __init__(self, device: torch.device) -> None:
        self.record = torch.zeros(3, dtype=torch.int32, device=device)
        self.counts = torch.zeros(COUNTS, dtype=torch.int32, device=device)
        self._counted = False
        self._winners: tuple[Tensor, Tensor] | None = None

    @property
    def threshold(self) -> Tensor:
        """The threshold as fp32 (0-d)."""
        return self.record[THRESHOLD].view(torch.float32)

    @property
    def last_index(self) -> Tensor:
        return self.record[LAST_INDEX]

    @property
    def crowded(self) -> Tensor:
        return self.record[CROWDED]

    def counts_to_fill(self) -> Tensor | None:
        """Return counts of zero for a scan. None: there is no threshold yet to count around."""
        if self._winners is None:
            return None
        if self._counted:
            self.counts.zero_()
        self._counted = True
        return self.counts

    @property
    def has_counts(self) -> bool:
        """True: the last scan has counted for a selection that is still to come."""
        return self._counted

    def take_counts(self) -> Tensor | None:
        """Return the counts of the last scan to one selection, which clears them; else None."""
        if not self._counted:
            return None
        self._counted = False
        return self.counts

    def remember(self, indices: Tensor, values: Tensor) -> None:
        """Note that `record` belongs to these winners now."""
        self._winners = (indices, values)

    def is_of(self, indices: Tensor | None, values: Tensor | None) -> bool:
        """Return True if exactly these tensors were chosen last."""
        winners = self._winners
        return winners is not None and indices is winners[0] and values is winners[1]
