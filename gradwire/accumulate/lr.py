"""Residuals keep their worth when the learning rate changes."""

import math
from typing import Any

from gradwire.errors import ConfigError

LEAST, MOST = 2.0**-63, 2.0**63
"""The least and the highest rate. The ratio of two is a normal fp32, which multiplies residuals."""


class LrTracker:
    """Tracker of the learning rate, which keeps each gradient at the rate of its step.

    The optimiser multiplies the update with the current rate. In units of the current rate, a
    gradient of an earlier step is worth the old rate over the new rate.
    """

    def __init__(self) -> None:
        self.rate = 0.0
        """The last rate above 0; 0 before the first one."""
        self.factor = 1.0
        """The factor by which residuals must still be multiplied."""

    def follow(self, lr: Any) -> None:
        """Note the rate of the next step; a rate of 0 moves nothing and changes nothing."""
        try:
            new = float(lr)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"follow_lr needs a learning rate, got {lr!r}") from error
        if not 0 <= new < math.inf:
            raise ConfigError(f"follow_lr: a learning rate must be at least 0, got {new}")
        if new and not LEAST <= new <= MOST:
            raise ConfigError(
                f"follow_lr: a learning rate must be 0, or from {LEAST:.2g} to {MOST:.2g}, got "
                f"{new}: in its units residuals overflow or vanish; 0 means a step without effect"
            )
        if new:
            self.factor *= self.rate / new if self.rate else 1.0
            self.rate = new

    def take_factor(self) -> float:
        """Return the factor, and reset it to 1."""
        factor, self.factor = self.factor, 1.0
        return factor
