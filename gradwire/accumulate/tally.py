"""What one bundle counts for `wire.stats()`, on the device."""

import torch
from torch import Tensor


class Tally:
    """Sums over all steps so far.

    energy: fp64 [2], of the values that were rounded, and of what rounding took from them.
    leaked: fp64 [2], of what an exchange lost, and of what was chosen for it.
    sent: the number of entries that left this rank. clipped: how often the gradient was clipped.
    """

    def __init__(self, device: torch.device) -> None:
        self.energy = torch.zeros(2, dtype=torch.float64, device=device)
        self.leaked = torch.zeros(2, dtype=torch.float64, device=device)
        self.sent = torch.zeros((), dtype=torch.int64, device=device)
        self.clipped = torch.zeros((), dtype=torch.int64, device=device)
        self._rounded: list[tuple[Tensor, Tensor]] = []
        self._counts: list[Tensor] = []

    def note_rounding(self, values: Tensor, seen: Tensor) -> None:
        """Remember values, and how receivers see them, for `add_up`."""
        self._rounded.append((values, seen))

    def note_sent(self, count: Tensor) -> None:
        """Remember how many entries left (0-d), for `add_up`."""
        self._counts.append(count)

    def add_up(self) -> None:
        """Add what was noted. Called between steps: inside a step others wait for the answer."""
        for values, seen in self._rounded:
            both = torch.stack([values, values - seen])
            norms = torch.linalg.vector_norm(both, dim=1, dtype=torch.float64)
            self.energy.addcmul_(norms, norms)
        for count in self._counts:
            self.sent += count
        self._rounded, self._counts = [], []
