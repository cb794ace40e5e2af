"""Trimmed top-k: a threshold that steps down from the maximum, then exactly k entries."""

from torch import Tensor

from gradwire.compress.method import Method
from gradwire.compress.thresholds import select_beyond, threshold_by_rule
from gradwire.kernels.threshold import Rule
from gradwire.types import Memory, Scan, Sparse


def trimmed(u: Tensor, k: int, memory: Memory, scan: Scan | None = None) -> Sparse:
    """A threshold that steps down from max |u| until k entries pass; then exactly the k largest.

    Trimmed top-k of RedSync (Fang et al. 2018), with its final exact selection. Most copies leave
    the selection out, and send 1.5 to 390 times k. t falls from max |u| towards mean |u|, by steps
    of the ratio. The first t with n >= k stops the fall.
    Different here:
    - The steps are even in log t: t = mean (max / mean)^(1 - 0.02 i). The paper's even steps of 0.2
      in t leave a third of a heavy-tailed u.
    - n >= k is tested on the group maxima: k groups must reach t.
    - The mean is the mean of a sample.

    The first two differences do not change the result, because the last selection is exact: n = k,
    or all entries that are not zero.
    """
    return select_beyond(u, threshold_by_rule(u, scan, Rule.LADDER, k), k, scan)


METHOD = Method(trimmed)
