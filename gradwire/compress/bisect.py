"""Threshold binary search: halve the range between mean and maximum until k < n < 2k."""

from torch import Tensor

from gradwire import kernels
from gradwire.compress.thresholds import SEEN, beyond, room, stride
from gradwire.types import Memory, Scan, Sparse

MOST = 2.0


def bisect(u: Tensor, k: int, memory: Memory, scan: Scan | None = None) -> Sparse:
    """A threshold by halving the range between mean |u| and max |u| until k < n < 2k.

    Threshold binary search of RedSync (Fang et al. 2018): t = mean + ratio (max - mean), ratio =
    (l + r) / 2 in [0, 1]; stop where k < n < 2k; n < k/2 lowers r, anything else raises l; until
    r - l < 2^-14 (copies stop at 0.2, after three tests: 0.27 k on a Gaussian, 0.001 k on t3).
    The last test is what is sent: k/2 <= n < 2k; where ties leave no such n, the largest 2k. The
    mean is that of a sample; n comes from the 2k largest, which settle every comparison.
    """
    if k == 0:
        return beyond(u, u.new_zeros(()), 0, scan)
    known = () if scan is None else (scan.maxima, scan.block, scan.edge)
    indices, values = kernels.select(u, room(k, u.numel(), MOST), *known)
    edge = () if scan is None else (scan.edge,)
    found = kernels.bisect_list(u, stride(u.numel(), SEEN), indices, values, k, *edge)
    return Sparse(*found, u.numel())
