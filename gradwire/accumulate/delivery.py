"""What a step leaves behind: residual = u - delivered, once the optimiser has taken the step."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.types import Delivered, Entries, Everything, Rounded


@dataclass
class Pending:
    """The delivery of one step, until the next step knows whether the optimiser took this one.

    ok: 0-d bool, False where some rank was not finite. Then nothing was delivered.
    mean_rounding: what rounding the mean to the gradient's dtype took away. Every rank keeps it.
    masked: the indices where momentum ends.
    forget: True without error feedback. Then nothing stays, even after a skipped step.
    withheld: (offset, residual) of each parameter that no rank used.
    """

    delivered: Delivered
    ok: Tensor
    mean_rounding: Tensor | None = None
    masked: Tensor | None = None
    forget: bool = False
    withheld: list[tuple[int, Tensor]] = field(default_factory=list)

    def settle(self, buffer: Tensor, skipped: Tensor) -> None:
        """Turn u into the residual, in place; `buffer` is u and one spare entry.

        After a `skipped` step (0-d bool) u stays, so its gradient waits in the residual.
        """
        if self.forget:
            buffer.zero_()
            return
        subtract(buffer, self.delivered, skipped)
        if self.mean_rounding is not None:
            # After a skipped step the rounding may be infinite, and 0 * inf is not 0.
            buffer.add_(torch.where(skipped, 0, self.mean_rounding))
            buffer[-1:].zero_()
        for offset, kept in self.withheld:
            buffer[offset : offset + kept.numel()] = kept

    def mask(self, velocity: Tensor, skipped: Tensor) -> None:
        """End the momentum of what was delivered, in place, unless the step was `skipped`."""
        if self.masked is not None:
            kernels.settle(velocity, self.masked, velocity[self.masked], skipped)


def subtract(buffer: Tensor, delivered: Delivered, skipped: Tensor) -> None:
    """residual = u - delivered, in place; nothing changes when `skipped` is True."""
    match delivered:
        case Everything():
            buffer.mul_(skipped)
        case Rounded(values):
            buffer[:-1].sub_(torch.where(skipped, 0, values))
        case Entries(sparse):
            kernels.settle(buffer, sparse.indices, sparse.values, skipped)
