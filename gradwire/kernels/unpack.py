"""unpack: messages in any encoding -> the same messages as int32 and fp32."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire.kernels.backend import uses_triton

if TYPE_CHECKING:
    from gradwire.encode.message import Encoding


def unpack(
    messages: Tensor, size: int, capacity: int, encoding: "Encoding", bare: bool = False
) -> Tensor:
    """uint8 [ranks, bytes]: each header as it came, `capacity` int32 indices, as many fp32 values.

    messages: uint8 [ranks, bytes] in `encoding`; rows need not follow each other. Common indices
    stay away. An index that points outside, or is not there, becomes padding: index = size,
    value = 0. Zeros fill up 16 bytes.
    bare: the messages end before their values, which become zero.
    """
    return _version(messages.device, encoding.values)(messages, size, capacity, encoding, bare)


@functools.cache
def _version(device: torch.device, values: str) -> Callable[..., Tensor]:
    if uses_triton(device) and values != "sign":  # has no kernel: it is for few exchanges
        from gradwire.kernels.unpack_triton import unpack_triton

        return unpack_triton
    # Not above: the reference uses the codes of `encode`, which uses this op.
    from gradwire.kernels.unpack_torch import unpack_torch

    return unpack_torch
