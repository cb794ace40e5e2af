"""The ops on vectors and messages. One file holds an op, its reference and its CPU twin.

`op` chooses the version for a device, `op_torch` is the reference on any device, `op_cpu` the CPU
twin. The folder `triton` has `op_triton`, which CUDA runs. Every version of an op has the same
signature and the same result, bit for bit. The exceptions are `first_threshold` and
`sidco_fit`. Their sums may differ in the last bits, and so may their thresholds.
"""

from gradwire.kernels.bisect_list import bisect_list
from gradwire.kernels.chunks import chunks
from gradwire.kernels.draw import draw, pick
from gradwire.kernels.fill_run import fill_run
from gradwire.kernels.find_by_counts import find_by_counts
from gradwire.kernels.join import join
from gradwire.kernels.largest import largest_in_pieces
from gradwire.kernels.mean import mean
from gradwire.kernels.messages import mean_of_messages
from gradwire.kernels.momentum import momentum
from gradwire.kernels.scan import scan
from gradwire.kernels.scatter import add_entries, reset_mean, settle
from gradwire.kernels.select import above, select, topk
from gradwire.kernels.sidco import sidco_adapt, sidco_fit
from gradwire.kernels.sketch import insert, query
from gradwire.kernels.threshold import first_threshold

__all__ = [
    "above",
    "add_entries",
    "bisect_list",
    "chunks",
    "draw",
    "fill_run",
    "find_by_counts",
    "first_threshold",
    "insert",
    "join",
    "largest_in_pieces",
    "mean",
    "mean_of_messages",
    "momentum",
    "pick",
    "query",
    "reset_mean",
    "scan",
    "select",
    "settle",
    "sidco_adapt",
    "sidco_fit",
    "topk",
]
