"""permuted: distinct draws without a sort of everything."""

from torch import Tensor

from gradwire.kernels.permuted_torch import permuted_torch


def permuted(x: Tensor, size: int, key: Tensor) -> Tensor:
    """Where each x (int64) lands under a permutation of 0..size-1 keyed by `key` (0-d int64).

    A Feistel network on an a x b grid that just covers `size`; what lands outside walks on until
    it is inside. The grid exceeds `size` by less than one row, so few walks leave an entry outside
    once in 10^20 draws, if at all; the caller treats such an entry as not drawn.
    """
    return permuted_torch(x, size, key)
