"""above: the entries beyond a threshold, at most as many as there is room for."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.kernels.above_cpu import above_cpu
from gradwire.kernels.above_torch import above_torch
from gradwire.kernels.backend import uses_triton
from gradwire.kernels.edge import Edge


def above(
    u: Tensor, threshold: Tensor, capacity: int, maxima: Tensor | None = None, group: int = 0,
    edge: Edge | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """int32 indices, values and count (0-d int32) of the entries with |u| > threshold.

    Ascending, padded to `capacity` with (size, 0). Where more entries pass, the `capacity` largest
    are taken, ties to the smaller index: a bad threshold cannot flood the wire.
    u: flat and finite. threshold: 0-d fp32 on u's device; NaN passes nothing. maxima: max |u| of
    every `group` consecutive entries, when a scan left them: a group whose maximum does not pass is
    not read. edge (CUDA): is told where the winners end.
    """
    if edge is None:
        return _version(u.device)(u, threshold, capacity, maxima, group)
    return _version(u.device)(u, threshold, capacity, maxima, group, edge)


@functools.cache
def _version(device: torch.device) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    if uses_triton(device):
        from gradwire.kernels.topk_triton import above_triton

        return above_triton
    return above_cpu if device.type == "cpu" else above_torch
