"""spread: add the entries of one message into a dense vector."""

import torch
from torch import Tensor


def start(out: Tensor, ok: Tensor) -> None:
    """Every entry of `out` becomes 0, or NaN where not `ok` (0-d bool)."""
    out.copy_(torch.where(ok, out.new_zeros(()), float("nan")))


def spread(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """`out[indices] += values`, in place; `out` has a spare last entry that takes the padding.

    Indices are unique within a message but for the padding, whose values are zero: the sum does
    not depend on the order in which a device adds them.
    """
    out.index_add_(0, indices, values)
