"""Choose the version of an op that a device gets.

Every op has a reference in plain torch, which runs on any device. Some ops have a CPU twin. Most
ops have a Triton version, which runs on CUDA.
"""

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

R = TypeVar("R")


def versions(
    reference: Callable[..., R],
    *,
    cpu: Callable[..., R] | None = None,
    triton: str | None = None,
) -> Callable[[torch.device], Callable[..., R]]:
    """Return a function that chooses the version of an op for a device.

    triton: the dotted path of the Triton version. The version is imported on first use, because CPU
    users need not have Triton.
    """

    @functools.cache
    def version(device: torch.device) -> Callable[..., R]:
        if triton is not None and uses_triton(device):
            module, _, name = triton.rpartition(".")
            return getattr(importlib.import_module(module), name)
        return cpu if cpu is not None and device.type == "cpu" else reference

    return version


@functools.cache
def uses_triton(device: torch.device) -> bool:
    """Return True if `device` runs the Triton kernels. Warn once if CUDA lacks Triton."""
    if device.type != "cuda":
        return False
    if importlib.util.find_spec("triton") is None:
        warnings.warn(
            "Triton is not installed: CUDA runs the torch reference, the same results at a tenth "
            "of the speed. pip install triton",
            stacklevel=3,
        )
        return False
    return True


@functools.lru_cache(maxsize=256)
def _constant(value: int, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=torch.int32, device=device)


def constant(value: int, device: torch.device) -> Tensor:
    """Return a 0-d int32 tensor that nobody may write to. A second call costs no launch."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.full((), value, dtype=torch.int32, device=device)
    return _constant(value, device)
