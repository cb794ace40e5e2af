"""Trimmed top-k: a threshold that steps down from the maximum, then exactly k of what passes."""

from torch import Tensor

from gradwire.compress.thresholds import beyond, level
from gradwire.kernels.threshold import Rule
from gradwire.types import Memory, Scan, Sparse


def trimmed(u: Tensor, k: int, memory: Memory, scan: Scan | None = None) -> Sparse:
    """A threshold that steps down from max |u| until k entries pass; then exactly the k largest.

    Trimmed top-k of RedSync (Fang et al. 2018), with its final exact selection, which most copies
    leave out (they send 1.5 to 390 times k). t falls from max |u| towards mean |u|, by steps of the
    ratio; the first with n >= k stops it. Different here: the steps are even in log t, t = mean
    (max / mean)^(1 - 0.02 i), because the paper's even steps of 0.2 in t leave a third of a
    heavy-tailed u; and n >= k is asked of the group maxima, which k groups must reach. Neither
    changes the result, since the last selection is exact: n = k, or all that are not zero. The mean
    is that of a sample.
    """
    return beyond(u, level(u, scan, Rule.LADDER, k), k, scan)
