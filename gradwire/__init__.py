"""gradwire: train PyTorch models over slow networks.

It sends the gradient entries that matter, keeps the rest for later, and loses nothing:

    ddp = DistributedDataParallel(model)
    wire = gradwire.attach(ddp, method="topk", density=0.001)

Each name is loaded when it is first used. Importing gradwire imports neither torch nor Triton,
reads no environment and configures no logging.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gradwire.version import __version__

if TYPE_CHECKING:
    from gradwire.compress.call import compress
    from gradwire.config import Config
    from gradwire.integrate.ddp import attach, ddp_hook
    from gradwire.integrate.local_steps import local_steps
    from gradwire.integrate.loop import average
    from gradwire.integrate.virtual_cluster import VirtualCluster
    from gradwire.plan.ask import plan
    from gradwire.state.saved.folder import load, save
    from gradwire.state.state import State
    from gradwire.types import Sparse

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

_HOMES = {
    "Config": "gradwire.config",
    "Sparse": "gradwire.types",
    "State": "gradwire.state.state",
    "VirtualCluster": "gradwire.integrate.virtual_cluster",
    "attach": "gradwire.integrate.ddp",
    "average": "gradwire.integrate.loop",
    "compress": "gradwire.compress.call",
    "ddp_hook": "gradwire.integrate.ddp",
    "load": "gradwire.state.saved.folder",
    "local_steps": "gradwire.integrate.local_steps",
    "plan": "gradwire.plan.ask",
    "save": "gradwire.state.saved.folder",
}
"""The module of each public name."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value
    # `gradwire.errors` and the like, after no more than `import gradwire`.
    if name.startswith("_") or find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _function(name: str) -> property:
    """Return a property for a function that a package of the same name must not replace."""

    def get(module: ModuleType) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(import_module(_HOMES[name]), name)
        return function

    return property(get, lambda module, package: None)


class _Module(ModuleType):
    """Class of this module, where `compress` and `plan` are functions.

    The packages of the same names would otherwise replace them when they are imported.
    """

    compress = _function("compress")
    plan = _function("plan")

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        # Trainers that send functions to workers pickle the modules that the functions use.
        return import_module, (__name__,)


sys.modules[__name__].__class__ = _Module
