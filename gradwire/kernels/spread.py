"""spread: add the entries of one message into a dense vector."""

from torch import Tensor


def spread(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """`out[indices] += values`, in place; `out` has a spare last entry that takes the padding.

    Indices are unique within a message but for the padding, whose values are zero: the sum does
    not depend on the order in which a device adds them.
    """
    out.index_add_(0, indices, values)
