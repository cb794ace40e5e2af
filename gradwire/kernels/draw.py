"""draw: entries of a vector at random, no two the same, without looking at it."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.kernels.backend import uses_triton
from gradwire.kernels.draw_torch import draw_torch, pick_torch


def draw(
    k: int,
    size: int,
    length: int,
    draws: Tensor,
    stream: int,
    ends: Tensor | None = None,
    shifts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """int32 indices, ascending, of k entries drawn uniformly from a vector; and how many they are.

    They are where 0 .. k-1 land under a permutation of 0 .. size-1 whose key is a hash of `draws`
    (0-d int64, how many draws there were, one more afterwards) and `stream`, a 64-bit number: the
    same on every device. A Feistel network permutes an a x b grid that just covers `size`; what
    lands outside walks on until it is inside.
    length: of the vector; `size` of it are not padding. ends, shifts (int64): the n-th of these is
    entry n + shifts[j], where j of the ends are <= n.
    """
    return _version(draws.device)(k, size, length, draws, stream, ends, shifts)


def pick(u: Tensor, indices: Tensor) -> Tensor:
    """The entries of u that were drawn; zero where none was."""
    if uses_triton(u.device):
        from gradwire.kernels.draw_triton import pick_triton

        return pick_triton(u, indices)
    return pick_torch(u, indices)


@functools.cache
def _version(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]]:
    if uses_triton(device):
        from gradwire.kernels.draw_triton import draw_triton

        return draw_triton
    return draw_torch
