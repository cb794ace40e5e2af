"""pack: the chosen entries -> the bytes of a message."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire.kernels.backend import uses_triton
from gradwire.types import Sparse

if TYPE_CHECKING:
    from gradwire.encode.message import Encoding
    from gradwire.encode.noise import Noise


def pack(
    template: Tensor, sparse: Sparse, finite: Tensor, encoding: "Encoding", noise: "Noise | None"
) -> tuple[Tensor, Tensor]:
    """(message, seen): uint8 as long as the template, and the fp32 values that receivers see.

    The header is the template's but for words 3 (count) and 4 (finite). Then come the indices and
    the values in `encoding`, then zeros. With `noise` rounding is stochastic.
    """
    return _version(template.device, encoding.values)(template, sparse, finite, encoding, noise)


@functools.cache
def _version(device: torch.device, values: str) -> Callable[..., tuple[Tensor, Tensor]]:
    if uses_triton(device) and values != "sign":  # has no kernel: it is for few exchanges
        from gradwire.kernels.pack_triton import pack_triton

        return pack_triton
    # Not above: the reference uses the codes of `encode`, which uses this op.
    from gradwire.kernels.pack_torch import pack_torch

    return pack_torch
