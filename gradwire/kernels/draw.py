"""draw: entries of a vector at random, no two the same, without looking at the others."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.kernels.backend import uses_triton
from gradwire.kernels.draw_torch import draw_torch


def draw(
    u: Tensor,
    k: int,
    size: int,
    draws: Tensor,
    stream: int,
    ends: Tensor | None = None,
    shifts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """int32 indices, ascending, of k entries drawn uniformly; the entries of u there; how many.

    They are where 0 .. k-1 land under a permutation of 0 .. size-1 whose key is a hash of `draws`
    (0-d int64, how many draws there were, one more afterwards) and `stream`, a 64-bit number: the
    same on every device. A Feistel network permutes an a x b grid that just covers `size`; what
    lands outside walks on until it is inside.
    size: entries of u that are not padding. ends, shifts (int64): the n-th of them is entry
    n + shifts[j] of u, where j of the ends are <= n.
    """
    return _version(u.device)(u, k, size, draws, stream, ends, shifts)


@functools.cache
def _version(device: torch.device) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    if uses_triton(device):
        from gradwire.kernels.draw_triton import draw_triton

        return draw_triton
    return draw_torch
