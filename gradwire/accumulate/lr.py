"""What waits in a residual, when the learning rate changes."""

import math
from typing import Any

from gradwire.errors import ConfigError


class LrTracker:
    """Keeps every gradient at the learning rate of its own step.

    The optimiser multiplies what arrives with the rate of now. In units of that rate a gradient of
    an earlier step is worth the old rate over the new one.
    """

    def __init__(self) -> None:
        self.rate = 0.0
        """The last rate above 0, 0 before there is one."""
        self.factor = 1.0
        """What residuals are still to be multiplied with."""

    def follow(self, lr: Any) -> None:
        """The rate of the next step. At 0 nothing moves, and nothing changes its worth."""
        try:
            new = float(lr)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"follow_lr needs a learning rate, got {lr!r}") from error
        if not 0 <= new < math.inf:
            raise ConfigError(f"follow_lr: a learning rate must be at least 0, got {new}")
        if new:
            self.factor *= self.rate / new if self.rate else 1.0
            self.rate = new

    def take(self) -> float:
        """The factor, which is 1 afterwards."""
        factor, self.factor = self.factor, 1.0
        return factor
