"""MSTopK: a threshold by halving the range between mean and maximum, then exactly k."""

from torch import Tensor

from gradwire.compress.method import Method
from gradwire.compress.thresholds import select_beyond, threshold_by_rule
from gradwire.kernels.threshold import Rule
from gradwire.types import Memory, Scan, Sparse


def mstopk(u: Tensor, k: int, memory: Memory, scan: Scan | None = None) -> Sparse:
    """A threshold by 25 halvings between mean |u| and max |u|; then exactly the k largest.

    MSTopK of Shi et al. (2021): t = mean + ratio (max - mean), and ratio in [0, 1] is halved N
    times. ratio goes up if n > k and down otherwise. The halvings end with t1 (n <= k) and t2 (n >
    k). Entries that pass t1 are taken; a random run of the entries between t1 and t2 fills up to k.
    Different here:
    - n > k is tested on the group maxima: k groups must reach the threshold. All halvings then are
      one formula.
    - Entries beyond t2 are cut by magnitude, so n = k, or all entries that are not zero. No luck is
      involved.
    - The mean is the mean of a sample.
    """
    return select_beyond(u, threshold_by_rule(u, scan, Rule.HALVES, k), k, scan)


METHOD = Method(mstopk)
