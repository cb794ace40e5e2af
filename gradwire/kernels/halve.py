"""halve: of the 2k largest entries, those beyond a threshold found by halving a range."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.kernels.backend import uses_triton
from gradwire.kernels.edge import Edge
from gradwire.kernels.halve_torch import halve_torch


def halve(
    u: Tensor, step: int, indices: Tensor, values: Tensor, k: int, edge: Edge | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """int32 indices, values and count (0-d int32) of the listed entries that pass, at least k/2.

    The threshold is the first of 14 halvings of the range from mean |u|, over every `step`-th
    entry, to max |u| that between k and 2k entries pass, neither included; else the last of them,
    or where k/2 do not pass that, what they do. Ascending, padded to the length of the list with
    (size, 0). indices, values: the 2k largest of u, or all, as `select` gives them; k is at
    least 1.
    edge (CUDA): has been told where these end, and is told where those that pass do.
    """
    if edge is None:
        return _version(u.device)(u, step, indices, values, k)
    return _version(u.device)(u, step, indices, values, k, edge)


@functools.cache
def _version(device: torch.device) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    if uses_triton(device):
        from gradwire.kernels.halve_triton import halve_triton

        return halve_triton
    return halve_torch
