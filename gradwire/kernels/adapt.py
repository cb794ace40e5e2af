"""adapt: the number of stages follows how many entries were chosen."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.kernels.adapt_torch import adapt_torch
from gradwire.kernels.backend import uses_triton


def adapt(stages: Tensor, calls: Tensor, ratios: Tensor, count: Tensor, k: int, most: int) -> None:
    """Count this call, in place; after every fifth, one stage more or less, 1 to `most`.

    One more where the mean of count / k is below 0.8, one less above 1.2. stages, calls: 0-d int64;
    ratios: the sum of count / k since the last change, 0-d fp32.
    """
    _version(stages.device)(stages, calls, ratios, count, k, most)


@functools.cache
def _version(device: torch.device) -> Callable[..., None]:
    if uses_triton(device):
        from gradwire.kernels.adapt_triton import adapt_triton

        return adapt_triton
    return adapt_torch
