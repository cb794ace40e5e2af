"""Methods of choosing entries: u -> Sparse, one file per method.

A method is a function `(u, k, memory, scan, *, options...) -> Sparse`. It changes nothing but
`memory`. To add a method, write it in a new file and name it in METHODS.
"""

import torch

from gradwire.compress.bisect import BISECT_CAPACITY, bisect
from gradwire.compress.chunked import check_chunked, chunked, chunked_block, chunked_capacity
from gradwire.compress.dense import dense
from gradwire.compress.dgc import check_dgc, dgc
from gradwire.compress.gaussiank import check_gaussiank, gaussiank, gaussiank_capacity
from gradwire.compress.method import BoundMethod, Method, Options
from gradwire.compress.mstopk import mstopk
from gradwire.compress.parts.deft import deft, deft_learns
from gradwire.compress.parts.exdyna import exdyna, exdyna_learns
from gradwire.compress.parts.micro import micro, micro_learns
from gradwire.compress.parts.partition import capacity_per_rank
from gradwire.compress.randk import check_randk, keeps_rest, prefetch_draw, randk
from gradwire.compress.sidco import sidco
from gradwire.compress.threshold import check_threshold, threshold
from gradwire.compress.thresholds import capacity_for, check_capacity
from gradwire.compress.topk import topk
from gradwire.compress.trimmed import trimmed
from gradwire.kernels.select import block_size

__all__ = ["METHODS", "BoundMethod", "Method"]


def _times_k(k: int, size: int, options: Options) -> int:
    return capacity_for(k, size, options["capacity"])


def _block_for_capacity(k: int, size: int, device: torch.device, options: Options) -> int:
    return block_size(size, _times_k(k, size, options), device)


METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method(topk, maxima16=True),
        Method(gaussiank, capacity=gaussiank_capacity, maxima16=True, check=check_gaussiank),
        Method(dgc, maxima16=True, check=check_dgc),
        Method(trimmed),
        Method(
            bisect,
            maxima16=True,
            capacity=lambda k, size, options: capacity_for(k, size, BISECT_CAPACITY),
        ),
        Method(mstopk),
        Method(sidco, capacity=_times_k, check=check_capacity),
        Method(
            threshold,
            capacity=_times_k,
            block=_block_for_capacity,
            maxima16=True,
            check=check_threshold,
        ),
        Method(chunked, capacity=chunked_capacity, block=chunked_block, check=check_chunked),
        Method(
            randk,
            common=lambda options: bool(options["shared"]),
            keeps_rest=keeps_rest,
            block=lambda k, size, device, options: 0,
            prefetch=prefetch_draw,
            check=check_randk,
        ),
        Method(micro, exchange="union", capacity_per_rank=capacity_per_rank, learns=micro_learns),
        Method(exdyna, exchange="union", capacity_per_rank=capacity_per_rank, learns=exdyna_learns),
        Method(deft, exchange="union", capacity_per_rank=capacity_per_rank, learns=deft_learns),
        Method(dense, common=lambda options: True),
    )
}
