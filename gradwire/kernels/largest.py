"""largest: the largest magnitudes inside every piece of a vector, so many of each."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.kernels.largest_cpu import largest_cpu
from gradwire.kernels.largest_torch import largest_torch


def largest(
    u: Tensor, bounds: Tensor, wanted: Tensor, capacity: int, maxima: Tensor, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """int32 indices, values and count (0-d int32) of the `wanted[i]` largest |u| of each piece i.

    Piece i is [bounds[i], bounds[i + 1]); bounds are multiples of `group`, but for the last, and
    cover u. Ascending, padded to `capacity` with (size, 0); ties go to the smaller index, zeros are
    not chosen. Where there are more, the `capacity` largest are taken; it is at least 1 where
    anything is wanted. wanted: at most what a piece has. u: flat and finite.
    maxima: max |u| of every `group` consecutive entries.
    """
    return _version(u.device)(u, bounds, wanted, capacity, maxima, group)


@functools.cache
def _version(device: torch.device) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return largest_cpu if device.type == "cpu" else largest_torch
