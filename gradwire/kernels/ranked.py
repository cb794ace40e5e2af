"""ranked: the r-th largest of a few values."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.kernels.backend import uses_triton
from gradwire.kernels.ranked_torch import ranked_torch


def ranked(values: Tensor, step: int, *ranks: int) -> Tensor:
    """For each rank, from 1 on, that largest of every `step`-th value; 0 where there are fewer.

    values: flat fp32, at least 0. Ranks ascend.
    """
    return _version(values.device)(values, step, *ranks)


@functools.cache
def _version(device: torch.device) -> Callable[..., Tensor]:
    if uses_triton(device):
        from gradwire.kernels.ranked_triton import ranked_triton

        return ranked_triton
    return ranked_torch
