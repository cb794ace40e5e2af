"""topk: the indices of the k largest magnitudes, exactly."""

import torch
from torch import Tensor

from gradwire.kernels.backend import uses_triton
from gradwire.kernels.topk_cpu import topk_cpu
from gradwire.kernels.topk_torch import topk_torch


def topk(u: Tensor, k: int, maxima: Tensor | None = None, group: int = 0) -> Tensor:
    """int32 indices, ascending, of the k largest |u|; ties go to the smaller index.

    u: flat and finite. maxima: max |u| of every `group` consecutive entries, when a scan left
    them; computed here otherwise.
    """
    return select(u, k, maxima, group)[0]


def select(
    u: Tensor, k: int, maxima: Tensor | None = None, group: int = 0
) -> tuple[Tensor, Tensor]:
    """The indices of `topk`, and the entries of u there."""
    if uses_triton(u.device):
        from gradwire.kernels.topk_triton import topk_triton

        return topk_triton(u, k, maxima, group)
    op = topk_cpu if u.device.type == "cpu" else topk_torch
    indices = op(u, k, maxima, group)
    return indices, u[indices]


def group_size(size: int, k: int, device: torch.device = torch.device("cpu")) -> int:
    """Entries a group for choosing k of `size`; 0 where groups cannot rule out enough to pay."""
    if device.type == "cuda":
        if k * 2000 <= size:
            return 64
        if k * 250 <= size:
            return 32
    elif k * 256 <= size:
        return 64
    return 16 if k * 48 <= size else 0
