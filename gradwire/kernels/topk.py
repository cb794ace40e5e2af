"""topk: the indices of the k largest magnitudes, exactly."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.kernels.backend import uses_triton
from gradwire.kernels.edge import Edge
from gradwire.kernels.topk_cpu import topk_cpu
from gradwire.kernels.topk_torch import topk_torch


def topk(u: Tensor, k: int, maxima: Tensor | None = None, group: int = 0) -> Tensor:
    """int32 indices, ascending, of the k largest |u|; ties go to the smaller index.

    u: flat and finite. maxima: max |u| of every `group` consecutive entries, when a scan left
    them; computed here otherwise.
    """
    return select(u, k, maxima, group)[0]


def select(
    u: Tensor,
    k: int,
    maxima: Tensor | None = None,
    group: int = 0,
    edge: Edge | None = None,
) -> tuple[Tensor, Tensor]:
    """The indices of `topk`, and the entries of u there.

    edge (CUDA): is told where the winners end.
    """
    if edge is None:
        return _version(u.device)(u, k, maxima, group)
    return _version(u.device)(u, k, maxima, group, edge)


@functools.cache
def _version(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]]:
    if uses_triton(device):
        from gradwire.kernels.topk_triton import topk_triton

        return topk_triton
    return _with_values(topk_cpu if device.type == "cpu" else topk_torch)


def _with_values(version: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def both(u: Tensor, k: int, maxima: Tensor | None, group: int) -> tuple[Tensor, Tensor]:
        indices = version(u, k, maxima, group)
        return indices, u[indices]

    return both


def group_size(size: int, k: int, device: torch.device = torch.device("cpu")) -> int:
    """Entries a group for choosing k of `size`; 0 where groups cannot rule out enough to pay."""
    if device.type == "cuda":
        if k * 2000 <= size:
            return 64
        if k * 250 <= size:
            return 32
        return 16 if k * 48 <= size else 0
    if k * 128 <= size:
        return 64
    return 32 if k * 48 <= size else 0
