"""decode: the messages of all ranks -> their mean, the same bits everywhere."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.kernels.backend import uses_triton
from gradwire.kernels.decode_torch import decode_torch
from gradwire.kernels.target import Target


def decode(
    gathered: Tensor,
    own: Tensor,
    size: int,
    capacity: int,
    values: torch.dtype,
    common: Tensor | None = None,
    into: Target | None = None,
) -> tuple[Tensor | None, Tensor]:
    """(mean, ok): fp32 [size + 1], the last entry spare, and whether every message can be used.

    gathered: uint8 [ranks, bytes], the messages in rank order. own: this rank's message, whose
    header the others must match in every word but count, and in the finite flag where it is 1.
    Messages hold `capacity` ascending indices (none when `common` are given) and as many `values`.
    Added from zero rank by rank, each value divided by the number of ranks; an index outside
    0..size-1 is passed over. When not ok (0-d bool) the mean is NaN everywhere.
    into: where the mean goes; None in its place where that is into pieces.
    """
    version = _version(gathered.device)
    return version(gathered, own, size, capacity, values, common, into)


@functools.cache
def _version(device: torch.device) -> Callable[..., tuple[Tensor | None, Tensor]]:
    if uses_triton(device):
        from gradwire.kernels.decode_triton import decode_triton

        return decode_triton
    return decode_torch
