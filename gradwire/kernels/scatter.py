"""Add the entries of a message to a dense vector, or subtract them from it."""

import torch
from torch import Tensor

from gradwire.kernels.dispatch import versions


def settle(buffer: Tensor, indices: Tensor, values: Tensor, skipped: Tensor) -> None:
    """Compute `buffer[indices] -= values` in place, unless `skipped` (0-d bool) is True.

    Indices are unique, except for padding, which points to the spare last entry of `buffer`. The
    spare entry is zero afterwards.
    """
    _settle_on(buffer.device)(buffer, indices, values, skipped)


def reset_mean(out: Tensor, ok: Tensor) -> None:
    """Set every entry of `out` to 0, or to NaN if `ok` (0-d bool) is False."""
    out.copy_(torch.where(ok, out.new_zeros(()), float("nan")))


def add_entries(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """Compute `out[indices] += values` in place; the spare last entry of `out` takes the padding.

    Indices are unique within a message, except for padding, whose values are zero. The sum
    therefore does not depend on the order in which a device adds.
    """
    out.index_add_(0, indices, values)


def settle_torch(buffer: Tensor, indices: Tensor, values: Tensor, skipped: Tensor) -> None:
    """Compute `settle` with torch ops."""
    buffer.index_add_(0, indices, -values * (~skipped).to(values.dtype))
    buffer[-1:].zero_()


def settle_cpu(buffer: Tensor, indices: Tensor, values: Tensor, skipped: Tensor) -> None:
    """Compute `settle` in one op: on the CPU a look at `skipped` waits for nothing."""
    if not skipped:
        buffer.index_add_(0, indices, values, alpha=-1)
    buffer[-1:].zero_()


_settle_on = versions(
    settle_torch, cpu=settle_cpu, triton="gradwire.kernels.triton.scatter.settle_triton"
)
