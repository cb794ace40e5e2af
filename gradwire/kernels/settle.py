"""settle: what was delivered leaves the residual."""

from torch import Tensor

from gradwire.kernels.backend import uses_triton
from gradwire.kernels.settle_torch import settle_torch


def settle(buffer: Tensor, indices: Tensor, values: Tensor, skipped: Tensor) -> None:
    """`buffer[indices] -= values`, in place, unless `skipped` (0-d bool); padding is passed over.

    Indices are unique but for the padding, which points at the spare last entry of `buffer`; that
    entry is zero afterwards.
    """
    if uses_triton(buffer.device):
        from gradwire.kernels.settle_triton import settle_triton

        settle_triton(buffer, indices, values, skipped)
    else:
        settle_torch(buffer, indices, values, skipped)
