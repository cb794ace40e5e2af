"""pack: the chosen entries -> the bytes of a message."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.kernels.backend import uses_triton
from gradwire.kernels.pack_torch import pack_torch


def pack(
    template: Tensor,
    indices: Tensor | None,
    values: Tensor,
    count: Tensor,
    finite: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """A message (uint8): the template with header words 3 (count) and 4 (finite) and the entries.

    After the header of 32 bytes come the int32 indices, unless they are None, then the values as
    `dtype`, cut at its largest number, then the template's zeros.
    """
    return _version(template.device)(template, indices, values, count, finite, dtype)


@functools.cache
def _version(device: torch.device) -> Callable[..., Tensor]:
    if uses_triton(device):
        from gradwire.kernels.pack_triton import pack_triton

        return pack_triton
    return pack_torch
