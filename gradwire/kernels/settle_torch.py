"""The reference of settle: plain torch, any device, no host sync."""

from torch import Tensor


def settle_torch(buffer: Tensor, indices: Tensor, values: Tensor, skipped: Tensor) -> None:
    """See `settle`."""
    buffer.index_add_(0, indices, -values * (~skipped).to(values.dtype))
    buffer[-1:].zero_()
