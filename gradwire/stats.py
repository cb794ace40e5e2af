"""What happened so far, in numbers."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Stats:
    """This rank's numbers since attaching (or since the start of the run that was resumed).

    bytes_sent: what left this rank, padding included. bytes_dense: what a ring all-reduce of the
    same gradients would have sent, 2 (P - 1) / P of their bytes. achieved_density: entries sent
    over entries there were. seconds: time per stage; on Gloo it overlaps with the backward pass.
    value_error_db: energy that rounding the values took from the messages, relative to theirs, in
    decibels; None where nothing was rounded. skipped: steps that the optimiser did not take.
    leaked: energy that an exchange exempt from the law lost of what this rank chose, over all that
    it chose; None for all others. clipped: how often a bundle's gradient was clipped. dense: why
    bundles were sent whole, and how often. bundles, memory_bytes: how the model was cut, and what
    that holds in memory.
    """

    steps: int
    world_size: int
    bytes_sent: int
    bytes_dense: int
    achieved_density: float
    residual_norm: float
    value_error_db: float | None = None
    leaked: float | None = None
    skipped: int = 0
    clipped: int = 0
    bundles: int = 0
    memory_bytes: int = 0
    dense: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def asdict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return dataclasses.asdict(self)
