"""gradwire: train PyTorch models over slow networks.

It sends the gradient entries that matter, keeps the rest for later, and loses nothing:

    ddp = DistributedDataParallel(model)
    wire = gradwire.attach(ddp, method="topk", density=0.001)

Importing it imports neither Triton nor CUDA, reads no environment and configures no logging.
"""

from gradwire.config import Config
from gradwire.integrate.ddp import attach, ddp_hook
from gradwire.integrate.local_steps import local_steps
from gradwire.integrate.loop import average
from gradwire.integrate.virtual_cluster import VirtualCluster
from gradwire.state.saved.folder import load, save
from gradwire.state.state import State
from gradwire.types import Sparse
from gradwire.version import __version__

# Last: the functions take the place of the packages of the same names, which stay importable.
from gradwire.compress.call import compress  # isort: skip
from gradwire.plan.planner import plan  # isort: skip

__all__ = [
    "Config",
    "Sparse",
    "State",
    "VirtualCluster",
    "__version__",
    "attach",
    "average",
    "compress",
    "ddp_hook",
    "load",
    "local_steps",
    "plan",
    "save",
]
