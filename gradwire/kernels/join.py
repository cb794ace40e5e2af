"""join: the index lists of all ranks -> their union, and what u has there."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.kernels.backend import uses_triton
from gradwire.kernels.join_torch import join_torch


def join(lists: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(where, values, count): the distinct indices, ascending, and u at each; count is 0-d int32.

    lists: flat int32, in 0..size; size is padding. where and values have room for the smaller of
    size and the length of the lists; behind `count` they are (size, 0).
    """
    return _version(u.device)(lists, u)


@functools.cache
def _version(device: torch.device) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    if uses_triton(device):
        from gradwire.kernels.join_triton import join_triton

        return join_triton
    return join_torch
