"""once: a magnitude that is taken from u once, and kept."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.kernels.backend import uses_triton
from gradwire.kernels.once_torch import once_torch


def once(kept: Tensor, u: Tensor, step: int, scale: float) -> Tensor:
    """The fp32 (0-d) just below `kept`; which is set first where it is 0.

    It becomes `scale` times the norm of every `step`-th entry of u. kept: 0-d fp32, at least 0.
    Versions may differ in the last bits of the norm.
    """
    return _version(u.device)(kept, u, step, scale)


@functools.cache
def _version(device: torch.device) -> Callable[..., Tensor]:
    if uses_triton(device):
        from gradwire.kernels.once_triton import once_triton

        return once_triton
    return once_torch
