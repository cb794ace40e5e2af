"""Counters of one bundle for `wire.stats()`, kept on the device."""

import torch
from torch import Tensor


class Tally:
    """Sums over all steps so far.

    energy: fp64 [2], the energy of the values before rounding, and of the errors of rounding.
    leaked: fp64 [2], the energy that an exchange lost, and the energy chosen for the exchange.
    forgotten: fp64 [2], the energy that decay took from residuals, and the energy of all u.
    sent: the number of entries that left this rank.
    clipped: the number of times the gradient was clipped.
    length_exchanges: the number of times ranks exchanged the lengths of their messages.
    """

    def __init__(self, device: torch.device) -> None:
        self.energy = torch.zeros(2, dtype=torch.float64, device=device)
        self.leaked = torch.zeros(2, dtype=torch.float64, device=device)
        self.forgotten = torch.zeros(2, dtype=torch.float64, device=device)
        self.sent = torch.zeros((), dtype=torch.int64, device=device)
        self.clipped = torch.zeros((), dtype=torch.int64, device=device)
        self.length_exchanges = 0
        self._rounded: list[tuple[Tensor, Tensor]] = []
        self._counts: list[Tensor] = []

    def note_rounding(self, values: Tensor, seen: Tensor) -> None:
        """Remember values and their rounded form, for `add_up`."""
        self._rounded.append((values, seen))

    def note_sent(self, count: Tensor) -> None:
        """Remember the number of entries that left this rank (0-d); `add_up` adds it."""
        self._counts.append(count)

    def add_up(self) -> None:
        """Add everything that was noted.

        Call this between steps, because within a step other ranks wait for this one.
        """
        for values, seen in self._rounded:
            pairs = torch.stack([values, values - seen])
            norms = torch.linalg.vector_norm(pairs, dim=1, dtype=torch.float64)
            self.energy.addcmul_(norms, norms)
        for count in self._counts:
            self.sent += count
        self._rounded, self._counts = [], []
