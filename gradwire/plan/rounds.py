"""Local steps: ranks train alone for a few steps, and then exchange differences of weights.

Nothing here was measured on a GPU. Passes over memory are counted in the code of
`gradwire.local_steps`, and FLOP of Muon in that of `gradwire.optim`.
"""

from collections.abc import Sequence

from gradwire.plan.machine import Machine

_STEPS = 5
"""Newton-Schulz steps of Muon."""
_FLAT = 10
"""The ratio of sides from which on a matrix counts as an embedding, which AdamW trains."""
OUTER_PASSES = 152 / 12
"""Passes of a round over the memory floor, in bytes per entry: the start of the round twice 24, the
difference of weights 12, x into the weights 8, the outer step 76, the new weights 8."""


def muon_seconds(shapes: Sequence[Sequence[int]], device: Machine) -> float:
    """Return the seconds that Muon's products take in a step; 0 without shapes."""
    return sum(map(newton_schulz_flops, shapes)) / device.matmul


def newton_schulz_flops(shape: Sequence[int]) -> float:
    """Return the FLOP of Newton-Schulz for a hidden matrix, and 0 for all other shapes.

    A step of an s x l matrix, s <= l, is X X^T (2 s s l), its square (2 s s s), and a product with
    X (2 s s l).
    """
    if len(shape) != 2:
        return 0.0
    short, long = sorted(shape)
    if short < 2 or long > _FLAT * short:
        return 0.0
    return _STEPS * (4.0 * short * short * long + 2.0 * short**3)
