"""topk: the indices of the k largest magnitudes, exactly."""

from torch import Tensor

from gradwire.kernels.topk_cpu import topk_cpu
from gradwire.kernels.topk_torch import topk_torch


def topk(u: Tensor, k: int, maxima: Tensor | None = None, group: int = 0) -> Tensor:
    """int32 indices, ascending, of the k largest |u|; ties go to the smaller index.

    u: flat and finite. maxima: max |u| of every `group` consecutive entries, when a scan left
    them; computed here otherwise.
    """
    if u.device.type == "cpu":
        return topk_cpu(u, k, maxima, group)
    return topk_torch(u, k)


def group_size(size: int, k: int) -> int:
    """Entries a group for choosing k of `size`; 0 where groups cannot rule out enough to pay."""
    if k * 256 <= size:
        return 64
    return 16 if k * 48 <= size else 0
