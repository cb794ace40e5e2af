"""mean: of one row a rank, added in rank order."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.kernels.backend import uses_triton
from gradwire.kernels.mean_torch import mean_torch


def mean(rows: Tensor) -> Tensor:
    """The fp32 mean of float rows [ranks, n], contiguous; added in order, in fp32."""
    return _version(rows.device)(rows)


@functools.cache
def _version(device: torch.device) -> Callable[[Tensor], Tensor]:
    if uses_triton(device):
        from gradwire.kernels.mean_triton import mean_triton

        return mean_triton
    return mean_torch
