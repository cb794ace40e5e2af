"""settle: what was delivered leaves the residual."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.kernels.backend import uses_triton
from gradwire.kernels.settle_torch import settle_torch


def settle(buffer: Tensor, indices: Tensor, values: Tensor, skipped: Tensor) -> None:
    """`buffer[indices] -= values`, in place, unless `skipped` (0-d bool); padding is passed over.

    Indices are unique but for the padding, which points at the spare last entry of `buffer`; that
    entry is zero afterwards.
    """
    _version(buffer.device)(buffer, indices, values, skipped)


@functools.cache
def _version(device: torch.device) -> Callable[..., None]:
    if uses_triton(device):
        from gradwire.kernels.settle_triton import settle_triton

        return settle_triton
    return settle_torch
