"""The delivery of a step, and the residual that remains: residual = u - delivered.

The delivery is subtracted only when the optimiser is known to have taken the step.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.types import Delivered, Entries, Everything, Rounded


@dataclass
class Pending:
    """The delivery of one step, kept until the next step knows if the optimiser took the step.

    ok: 0-d bool, False if some rank was not finite. Then nothing was delivered.
    mean_rounding: the part of the mean that rounding to the gradient's dtype took away. Every rank
    keeps the same part.
    masked: the indices at which momentum ends.
    forget: True without error feedback. Then nothing stays, even after a skipped step.
    withheld: (offset, residual) of each parameter that no rank used.
    owned_rounding: the rounding that this rank keeps of its part of the mean; None without owners.
    """

    delivered: Delivered
    ok: Tensor
    mean_rounding: Tensor | None = None
    masked: Tensor | None = None
    forget: bool = False
    withheld: list[tuple[int, Tensor]] = field(default_factory=list)
    owned_rounding: Tensor | None = None

    def settle(self, buffer: Tensor, skipped: Tensor) -> None:
        """Turn u into the residual, in place; `buffer` is u and one spare entry.

        After a `skipped` step (0-d bool) u stays, so its gradient waits in the residual.
        """
        if self.forget:
            buffer.zero_()
            return
        subtract_delivered(buffer, self.delivered, skipped)
        if self.mean_rounding is not None:
            # After a skipped step the rounding may be infinite, and 0 * inf is not 0.
            buffer.add_(torch.where(skipped, 0, self.mean_rounding))
            buffer[-1:].zero_()
        for offset, kept in self.withheld:
            buffer[offset : offset + kept.numel()] = kept

    def mask(self, velocity: Tensor, skipped: Tensor) -> None:
        """End the momentum of delivered entries, in place, unless the step was `skipped`."""
        if self.masked is not None:
            kernels.settle(velocity, self.masked, velocity[self.masked], skipped)


def subtract_delivered(buffer: Tensor, delivered: Delivered, skipped: Tensor) -> None:
    """Compute residual = u - delivered in place; change nothing if `skipped` is True."""
    match delivered:
        case Everything():
            buffer.mul_(skipped)
        case Rounded(values):
            buffer[:-1].sub_(torch.where(skipped, 0, values))
        case Entries(sparse):
            kernels.settle(buffer, sparse.indices, sparse.values, skipped)
