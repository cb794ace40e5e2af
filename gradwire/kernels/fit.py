"""fit: a threshold from exponential fits to the tail, in stages."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.kernels.backend import uses_triton
from gradwire.kernels.fit_torch import fit_torch


def fit(u: Tensor, step: int, share: float, stages: Tensor, most: int) -> Tensor:
    """The threshold (0-d fp32) after `stages` (0-d int64), 1 to `most`, that aim at `share`.

    Over every `step`-th |u|. One stage: the mean times ln(1 / share). More: the first aims at a
    quarter, each next at the same share of what passed: t = min + (mean - min) ln(1 / that share),
    min and mean over those; where nothing passed, the largest. Versions differ in the last bits of
    the sums, and by what follows from that.
    """
    return _version(u.device)(u, step, share, stages, most)


@functools.cache
def _version(device: torch.device) -> Callable[..., Tensor]:
    if uses_triton(device):
        from gradwire.kernels.fit_triton import fit_triton

        return fit_triton
    return fit_torch
