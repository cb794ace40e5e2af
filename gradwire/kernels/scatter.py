"""Add the entries of a message to a dense vector, or take them away."""

import torch
from torch import Tensor

from gradwire.kernels.dispatch import versions


def settle(buffer: Tensor, indices: Tensor, values: Tensor, skipped: Tensor) -> None:
    """`buffer[indices] -= values`, in place, unless `skipped` (0-d bool); padding is passed over.

    Indices are unique but for the padding, which points at the spare last entry of `buffer`; that
    entry is zero afterwards.
    """
    _settle_on(buffer.device)(buffer, indices, values, skipped)


def start(out: Tensor, ok: Tensor) -> None:
    """Every entry of `out` becomes 0, or NaN where not `ok` (0-d bool)."""
    out.copy_(torch.where(ok, out.new_zeros(()), float("nan")))


def spread(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """`out[indices] += values`, in place; `out` has a spare last entry that takes the padding.

    Indices are unique within a message but for the padding, whose values are zero: the sum does
    not depend on the order in which a device adds them.
    """
    out.index_add_(0, indices, values)


def settle_torch(buffer: Tensor, indices: Tensor, values: Tensor, skipped: Tensor) -> None:
    """See `settle`."""
    buffer.index_add_(0, indices, -values * (~skipped).to(values.dtype))
    buffer[-1:].zero_()


_settle_on = versions(settle_torch, triton="gradwire.kernels.triton.scatter.settle_triton")
