"""Threshold binary search: halve the range between mean and maximum until k < n < 2k."""

from torch import Tensor

from gradwire import kernels
from gradwire.compress.method import Method
from gradwire.compress.thresholds import SAMPLE_SIZE, capacity_for, prime_stride, select_beyond
from gradwire.types import Memory, Scan, Sparse

BISECT_CAPACITY = 2.0
"""The most entries that bisect sends, over k."""


def bisect(u: Tensor, k: int, memory: Memory, scan: Scan | None = None) -> Sparse:
    """A threshold by halving the range between mean |u| and max |u| until k < n < 2k.

    Threshold binary search of RedSync (Fang et al. 2018), where n entries pass the threshold t:
    - t = mean + ratio (max - mean), with ratio = (l + r) / 2 in [0, 1].
    - The search stops if k < n < 2k. If n < k/2, r is lowered; otherwise l is raised.
    - The search also stops if r - l < 2^-14. Copies stop at 0.2, after three tests. They send 0.27
      k on a Gaussian, and 0.001 k on t3.

    The entries of the last test are sent: k/2 <= n < 2k. If ties leave no such n, the largest 2k
    are sent. The mean is the mean of a sample. n comes from the 2k largest entries, which settle
    every comparison.
    """
    if k == 0:
        return select_beyond(u, u.new_zeros(()), 0, scan)
    known = () if scan is None else (scan.maxima, scan.block, scan.edge)
    indices, values = kernels.select(u, capacity_for(k, u.numel(), BISECT_CAPACITY), *known)
    edge = () if scan is None else (scan.edge,)
    chosen = kernels.bisect_list(u, prime_stride(u.numel(), SAMPLE_SIZE), indices, values, k, *edge)
    return Sparse(*chosen, u.numel())


METHOD = Method(
    bisect,
    maxima16=True,
    capacity=lambda k, size, options: capacity_for(k, size, BISECT_CAPACITY),
)
