"""adapt on CUDA: one small launch."""

import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.adapt_torch import EVERY, FEW, MANY
from gradwire.kernels.launch_triton import Launcher, aligned

OFTEN = tl.constexpr(EVERY)
LOW = tl.constexpr(FEW * EVERY)
HIGH = tl.constexpr(MANY * EVERY)


@triton.jit(do_not_specialize=["most"])
def _adapt(stages, calls, ratios, count, share, most):
    ratio = tl.load(ratios) + tl.load(count).to(tl.float32) * share
    call = tl.load(calls) + 1
    due = call % OFTEN == 0
    change = (ratio < LOW).to(tl.int32) - (ratio > HIGH).to(tl.int32)
    wanted = tl.load(stages) + tl.where(due, change, 0)
    tl.store(stages, tl.minimum(tl.maximum(wanted, 1), most))
    tl.store(calls, call)
    tl.store(ratios, tl.where(due, 0.0, ratio))


# One warp reads everything before it writes.
_launch = Launcher(_adapt, num_warps=1, enable_fp_fusion=False)


def adapt_triton(
    stages: Tensor, calls: Tensor, ratios: Tensor, count: Tensor, k: int, most: int
) -> None:
    """See `adapt`."""
    key = aligned(stages, calls, ratios, count)
    _launch(1, key, stages, stages, calls, ratios, count, 1 / max(1, k), most)
