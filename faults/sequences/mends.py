"""Mends that can be taken back, to show that the fuzzer finds again what they mend."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor

_FLOATS = {torch.float32: None}
_FACTORIES = ("empty", "full", "ones", "tensor", "zeros")


class _Forgetful:
    """The module torch, whose factories take the default dtype in place of fp32."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        return _without_dtype(value) if name in _FACTORIES else value


def _without_dtype(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, dtype: torch.dtype | None = None, **more: Any) -> Any:
        return factory(*args, dtype=_FLOATS.get(dtype, dtype), **more)  # type: ignore[arg-type]

    return make


def _strides() -> list[Any]:
    """Buckets are cut without a look at the order of a parameter's entries."""
    from gradwire.integrate.ddp.order import BucketPart

    def trust(self: BucketPart, slot: Any) -> tuple[int, ...]:
        self.filled, self.certain = slot.stride, True
        return self.filled

    return [mock.patch.object(BucketPart, "find_strides", trust)]


def _handshake() -> list[Any]:
    """Ranks compare neither scaler nor unused parameters as they attach."""
    from gradwire.accumulate.step_status import StepStatus
    from gradwire.integrate.ddp.engine import Engine

    return [
        mock.patch.object(StepStatus, "handshake_settings", return_value={}),
        mock.patch.object(Engine, "_handshake_settings", return_value={}),
    ]


def _dtypes() -> list[Any]:
    """Factories take the default dtype, which is the user's."""
    for name in ("accumulate.bundle", "accumulate.tally", "path", "kernels.select", "encode"):
        import_module(f"gradwire.{name}")
    modules = [m for name, m in sys.modules.items() if name.startswith("gradwire.")]
    forgetful = _Forgetful()
    return [mock.patch.object(m, "torch", forgetful) for m in modules if hasattr(m, "torch")]


def _scaler() -> list[Any]:
    """A step counts as skipped if the scale is lower than it was in that step."""
    from gradwire.accumulate.step_status import StepStatus

    def overflow(self: Any) -> Tensor | None:
        before, scale = self.scale, self._current_scale()
        return None if scale is None or before is None else scale < before

    return [mock.patch.object(StepStatus, "_overflow", overflow)]


MENDS: dict[str, Callable[[], list[Any]]] = {
    "strides": _strides,
    "handshake": _handshake,
    "dtypes": _dtypes,
    "scaler": _scaler,
}
"""By name, the patches that take a mend back."""


@contextlib.contextmanager
def taken_back(name: str) -> Iterator[None]:
    """Take a mend back for a while; "" for none."""
    with contextlib.ExitStack() as stack:
        for patch in MENDS[name]() if name else ():
            stack.enter_context(patch)
        yield


def take_back(name: str) -> None:
    """Take a mend back in this process for good; "" for none."""
    for patch in MENDS[name]() if name else ():
        patch.start()
