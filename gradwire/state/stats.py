"""The numbers of a run so far: bytes, densities, seconds, residuals."""

import dataclasses
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gradwire.state.state import State


@dataclass(frozen=True)
class Stats:
    """One rank's numbers since `attach`, or since the start of the run that was resumed.

    bytes_sent: the bytes that left this rank, padding included.
    bytes_dense: the bytes that a ring all-reduce of the same gradients would have sent,
        2 (P - 1) / P times their size.
    achieved_density: the entries sent, over all entries.
    value_error_db: the energy that rounding took from the values sent, relative to theirs, in
        decibels. None if nothing was rounded.
    leaked: the energy that an exchange exempt from the law lost, over the energy of all that this
        rank chose. None for every other exchange.
    forgotten: the energy that `decay` took from residuals, over the energy of all gradients with
        their residuals. None if decay is 1.
    skipped: the steps that the optimiser did not take.
    clipped: how often a bundle's gradient was clipped.
    length_exchanges: how often ranks exchanged the lengths of a bundle's messages, for which the
        host waits. Only gaussiank's variants paper and released need it.
    bundles, memory_bytes: the number of bundles, and the memory that they hold.
    dense: by reason, how often a bundle was sent whole.
    seconds: time per stage, which overlaps with the backward pass. On CUDA the first eight steps
        are timed, and then one step of eight, which counts for all eight.
    """

    steps: int
    world_size: int
    bytes_sent: int
    bytes_dense: int
    achieved_density: float
    residual_norm: float
    value_error_db: float | None = None
    leaked: float | None = None
    forgotten: float | None = None
    skipped: int = 0
    clipped: int = 0
    length_exchanges: int = 0
    bundles: int = 0
    memory_bytes: int = 0
    dense: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def asdict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return dataclasses.asdict(self)


class Growth:
    """Watch for a residual that grew at each of the last ten looks, tenfold in all; warns once."""

    def __init__(self) -> None:
        self._norms: list[float] = []
        self._warned = False

    def look(self, norm: float, density: float) -> None:
        """Take note of the present norm of the residual, and warn if it keeps growing."""
        self._norms = [*self._norms[-9:], norm]
        grown = all(a < b for a, b in zip(self._norms, self._norms[1:], strict=False))
        if self._warned or len(self._norms) < 10 or not grown or norm < 10 * self._norms[0]:
            return
        self._warned = True
        warnings.warn(
            f"the residual keeps growing: its norm went from {self._norms[0]:.3g} to {norm:.3g}. "
            f"Raise density (now {density:g}) or lower the learning rate.",
            stacklevel=5,
        )


def stats_of(state: "State") -> Stats:
    """Return the numbers of one rank so far. Waits for the device."""
    skipped, bundles, counts = state.was_skipped(), state.bundles, state._counts
    squares = [b.residual(skipped).square().sum(dtype=torch.float64) for b in bundles]
    norm = state.lr.factor * float(sum(squares)) ** 0.5 if squares else 0.0
    # Multiplied by the rate, because residuals are in units of a rate that may fall.
    state._growth.look(norm * (state.lr.rate or 1.0), state.config.density)
    sent = state.entries_sent()
    whole, lost = _sums([b.tally.energy for b in bundles])
    forgotten, whole_u = _sums([b.forgotten(skipped) for b in bundles])
    leaked, chosen = _sums([b.tally.leaked for b in bundles])
    return Stats(
        steps=state.steps,
        world_size=state.group.size,
        bytes_sent=counts["bytes_before"] + state.group.bytes_sent,
        bytes_dense=counts["bytes_dense"],
        achieved_density=sent / max(1, counts["entries"]),
        residual_norm=norm,
        value_error_db=10 * math.log10(lost / whole) if lost else None,
        leaked=leaked / chosen if chosen else None,
        forgotten=forgotten / whole_u if whole_u else None,
        skipped=int(state.status.count) + int(skipped),
        clipped=counts["clipped"] + sum(int(b.tally.clipped) for b in bundles),
        length_exchanges=counts["length_exchanges"]
        + sum(b.tally.length_exchanges for b in bundles),
        bundles=len(bundles),
        memory_bytes=state.memory_bytes,
        dense={k[6:]: n for k, n in counts.items() if k.startswith("dense:")},
        seconds=state.clock.seconds(),
    )


def _sums(pairs: Sequence[Tensor]) -> tuple[float, float]:
    first, second = torch.stack(list(pairs)).sum(0).tolist()
    return first, second
