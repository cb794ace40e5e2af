"""level: a threshold that enough entries pass, from a sample of u and from group maxima."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradwire.kernels.backend import uses_triton
from gradwire.kernels.level_torch import Rule, level_torch


def level(
    rule: Rule, u: Tensor, step: int, maxima: Tensor, every: int, ranks: Sequence[int],
    scale: float = 1.0, whole: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The fp32 (0-d) just below the magnitude that `rule` finds, which is never above `sure`.

    sure: the ranks[0]-th largest, from 1 on, of every `every`-th of the maxima (flat fp32, at least
    0), 0 where there are fewer. Over every `step`-th entry of u a mean is taken; see `Rule`.
    whole: max |u| is that of this vector. Versions may differ in the last bits of a mean, and by
    what follows from that.
    """
    return _version(u.device)(rule, u, step, maxima, every, ranks, scale, whole)


@functools.cache
def _version(device: torch.device) -> Callable[..., Tensor]:
    if uses_triton(device):
        from gradwire.kernels.level_triton import level_triton

        return level_triton
    return level_torch
