"""One file an op: `op` chooses, `op_torch` is the reference on any device, `op_cpu` the CPU twin,
`op_triton` what CUDA runs.

Every version of an op has the same signature and the same result, bit for bit; but for `level`,
`fit` and `once`, whose thresholds may differ as their sums do. `quantile` is CUDA's alone.
"""

from gradwire.kernels.above import above
from gradwire.kernels.adapt import adapt
from gradwire.kernels.chunks import chunks
from gradwire.kernels.decode import decode
from gradwire.kernels.draw import draw, pick
from gradwire.kernels.fit import fit
from gradwire.kernels.halve import halve
from gradwire.kernels.join import join
from gradwire.kernels.largest import largest
from gradwire.kernels.level import level
from gradwire.kernels.mean import mean
from gradwire.kernels.momentum import momentum
from gradwire.kernels.once import once
from gradwire.kernels.pack import pack
from gradwire.kernels.quantile import quantile
from gradwire.kernels.scan import scan
from gradwire.kernels.settle import settle
from gradwire.kernels.sketch import insert, query
from gradwire.kernels.spread import spread, start
from gradwire.kernels.topk import select, topk
from gradwire.kernels.unpack import unpack

__all__ = [
    "above",
    "adapt",
    "chunks",
    "decode",
    "draw",
    "fit",
    "halve",
    "insert",
    "join",
    "largest",
    "level",
    "mean",
    "momentum",
    "once",
    "pack",
    "pick",
    "quantile",
    "query",
    "scan",
    "select",
    "settle",
    "spread",
    "start",
    "topk",
    "unpack",
]
