"""One file an op: `op` chooses, `op_torch` is the reference on any device, `op_cpu` the fast CPU twin.

Every version of an op has the same signature and the same result, bit for bit. A Triton version
(`op_triton`) slots in beside them and is chosen by the same dispatcher.
"""

from gradwire.kernels.scan import scan
from gradwire.kernels.spread import spread
from gradwire.kernels.topk import topk

__all__ = ["scan", "spread", "topk"]
