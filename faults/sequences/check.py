"""The checks after an operation: the law, equal replicas, and nothing changed by a refusal."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from faults.sequences.answer import Answer, Look, Vector

TOLERANCE, ROUNDED = 3e-5, 2**-9
"""The largest error of the law, in units of the largest summand; and the rounding of bf16.

A dense mean of P ranks in bf16 rounds P summands and their sums, and the law has P times the mean:
P * P such roundings.
"""
NESTEROV = 0.5
"""Outer momentum of local steps."""


class Finding(Exception):
    """A promise that was not kept."""


def check_equal(looks: Sequence[Look], shares: bool) -> None:
    """Raise unless all replicas are the same bits; with `shares` only what local steps share."""
    first = looks[0]
    for rank, look in enumerate(looks):
        pairs = [("steps", first.steps, look.steps)]
        if shares:
            assert first.shared is not None
            assert look.shared is not None
            pairs.append(("shared weights", first.shared.tobytes(), look.shared.tobytes()))
        else:
            pairs.append(("parameters", first.parameters.tobytes(), look.parameters.tobytes()))
            pairs.append(("optimiser", first.optimizer, look.optimizer))
        for name, one, other in pairs:
            if one != other:
                raise Finding(f"replicas differ: the {name} of ranks 0 and {rank}")


def check_unchanged(before: Look, after: Look, rank: int, residual: bool = True) -> None:
    """Raise unless an operation has changed nothing on a rank."""
    pairs: list[tuple[str, object, object]] = [
        ("parameters", before.parameters.tobytes(), after.parameters.tobytes()),
        ("optimiser", before.optimizer, after.optimizer),
    ]
    if before.shared is not None and after.shared is not None:
        pairs.append(("shared weights", before.shared.tobytes(), after.shared.tobytes()))
    if residual and before.residual is not None and after.residual is not None:
        pairs.append(("residual", before.residual.tobytes(), after.residual.tobytes()))
    for name, one, other in pairs:
        if one != other:
            raise Finding(f"the {name} of rank {rank} changed")


def check_law(
    came: Vector,
    out: Vector,
    old: Vector,
    new: Vector,
    size: float = 0.0,
    tolerance: float = TOLERANCE,
) -> None:
    """Raise unless gradients and old residuals are the updates and new residuals, summed.

    Each is [ranks, entries]; `out` is what each rank was given. size: of numbers that were
    subtracted from each other to learn `out`, whose rounding counts too. tolerance: the largest
    error, in units of the largest summand.
    """
    parts = [part.astype(np.float64) for part in (came, old, out, new)]
    error = np.abs(parts[0].sum(0) + parts[1].sum(0) - parts[2].sum(0) - parts[3].sum(0))
    largest = max(float(np.abs(part).max()) for part in parts)
    allowed = tolerance * largest + 1e-6 * size + 1e-30
    worst = int(np.argmax(np.where(np.isnan(error), np.inf, error)))
    if not error[worst] <= allowed:
        raise Finding(
            f"the law: entry {worst} is off by {error[worst]:.3g}, the largest summand is "
            f"{largest:.3g}"
        )


@dataclass
class OuterStep:
    """The outer step of local steps, followed from outside."""

    momentum: float
    velocity: Vector

    def update_of(self, before: Vector, after: Vector) -> Vector:
        """Return the update that moved the shared weights, and remember the velocity."""
        moved, m = before.astype(np.float64) - after, self.momentum
        update = (moved - m * m * self.velocity) / (1 + m)
        self.velocity = m * self.velocity + update
        return update


def rows_of(vectors: Sequence[Vector | None], like: Vector) -> Vector:
    """Return vectors as rows, with zeros for none."""
    return np.stack([np.zeros_like(like) if v is None else v for v in vectors])


def describe(answers: Sequence[Answer | None]) -> str:
    """Return the outcome of every rank as text."""
    words = ["died" if a is None else f"{a.kind}: {a.error:.200}" * bool(a.kind) for a in answers]
    return "; ".join(f"rank {rank}: {text or 'went on'}" for rank, text in enumerate(words))
