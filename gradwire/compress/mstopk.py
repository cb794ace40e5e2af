"""MSTopK: a threshold by halving the range between mean and maximum, then exactly k."""

from torch import Tensor

from gradwire.compress.thresholds import beyond, level
from gradwire.kernels.threshold import Rule
from gradwire.types import Memory, Scan, Sparse


def mstopk(u: Tensor, k: int, memory: Memory, scan: Scan | None = None) -> Sparse:
    """A threshold by 25 halvings between mean |u| and max |u|; then exactly the k largest.

    MSTopK of Shi et al. (2021): t = mean + ratio (max - mean), ratio in [0, 1] is halved N times,
    up where n > k and down otherwise. It ends with t1 (n <= k) and t2 (n > k), takes what passes t1
    and fills up to k with a random run of what lies between. Different here: n > k is asked of the
    group maxima, which k groups must reach, so all halvings are one formula; and what lies beyond
    t2 is cut by magnitude, so n = k, or all that are not zero, and no luck is involved. The mean is
    that of a sample.
    """
    return beyond(u, level(u, scan, Rule.HALVES, k), k, scan)
