"""What every exchange returns."""

from dataclasses import dataclass

from torch import Tensor

from gradwire.types import Sparse


@dataclass(frozen=True)
class Outcome:
    """The mean over all ranks, and what this rank gave to it.

    update: fp32, `size` + 1 entries, the last one spare; NaN everywhere when not ok; None where it
    went straight to where it was wanted. delivered: this rank's entries as receivers see them; a
    flat tensor where all of them went, rounded; None where all of u went as it is. ok: 0-d bool,
    False when some rank was not finite; then nothing was delivered. leaked: fp64 [2], the energy
    that is lost and that of what was chosen, of an exchange that is exempt from the law.
    """

    update: Tensor | None
    delivered: Sparse | Tensor | None
    ok: Tensor
    leaked: Tensor | None = None
