"""What waits in a residual, when the learning rate changes."""

import math
from typing import Any

from gradwire.errors import ConfigError


class Worth:
    """Keeps every gradient at the learning rate of its own step.

    The optimiser multiplies what arrives with the rate of now. In units of that rate a gradient of
    an earlier step is worth the old rate over the new one.
    """

    def __init__(self) -> None:
        self.lr = 0.0
        """The last rate above 0, 0 before there is one."""
        self.factor = 1.0
        """What residuals are still to be multiplied with."""

    def follow(self, lr: Any) -> None:
        """The rate of the next step. At 0 nothing moves, and nothing changes its worth."""
        try:
            rate = float(lr)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"follow_lr needs a learning rate, got {lr!r}") from error
        if not 0 <= rate < math.inf:
            raise ConfigError(f"follow_lr: a learning rate must be at least 0, got {rate}")
        if rate:
            self.factor *= self.lr / rate if self.lr else 1.0
            self.lr = rate

    def take(self) -> float:
        """The factor, which is 1 afterwards."""
        factor, self.factor = self.factor, 1.0
        return factor
