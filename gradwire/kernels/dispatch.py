"""Choose the version of an op that a device gets.

Every op has a reference in plain torch, which runs on any device. Some ops have a CPU twin. Most
ops have a Triton version, which runs on CUDA. While kernels are being compiled, `hold_kernels`
makes CUDA run the references, which give the same bits.
"""

import functools
import importlib
import importlib.util
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

R = TypeVar("R")

_holds: set[object] = set()
"""What keeps CUDA on the references: wires whose kernels compile, and bundles on their way."""


class _Thread(threading.local):
    on_references: bool | None = None
    """The choice for the bundle that this thread works on; None between bundles."""


_thread = _Thread()


def versions(
    reference: Callable[..., R],
    *,
    cpu: Callable[..., R] | None = None,
    triton: str | None = None,
    unseen: bool = False,
) -> Callable[[torch.device], Callable[..., R]]:
    """Return a function that chooses the version of an op for a device.

    triton: the dotted path of the Triton version. The version is imported on first use, because CPU
    users need not have Triton. unseen: True if that version has not run on a GPU yet; then it is
    not chosen.
    """

    @functools.cache
    def usual(device: torch.device) -> Callable[..., R]:
        if triton is not None and not unseen and has_kernels(device):
            module, _, name = triton.rpartition(".")
            return getattr(importlib.import_module(module), name)
        return cpu if cpu is not None and device.type == "cpu" else reference

    def version(device: torch.device) -> Callable[..., R]:
        # The first half is nearly free, and nearly always decides.
        if _holds and device.type == "cuda" and on_references():
            return reference
        return usual(device)

    return version


def uses_triton(device: torch.device) -> bool:
    """Return True if `device` runs the Triton kernels now."""
    return has_kernels(device) and not (_holds and on_references())


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Return True if `device` can run the Triton kernels. Warn once if CUDA lacks Triton."""
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


def hold_kernels() -> object:
    """Make CUDA run the references until the returned hold is given to `release_kernels`."""
    hold = object()
    _holds.add(hold)
    return hold


def release_kernels(hold: object) -> None:
    """End a hold. A second call does nothing."""
    _holds.discard(hold)


def on_references() -> bool:
    """Return True if this thread runs the references now."""
    chosen = _thread.on_references
    return bool(_holds) if chosen is None else chosen


@contextmanager
def one_version() -> Iterator[None]:
    """Keep this thread on the kernels or on the references to the end of a bundle's step.

    A scan leaves notes for the selection after it, which a reference would neither fill nor read.
    """
    if _thread.on_references is not None:
        yield
        return
    hold = object()
    _thread.on_references = bool(_holds)
    if _thread.on_references:
        # Versions look at the thread's choice only while anything is held.
        _holds.add(hold)
    try:
        yield
    finally:
        _holds.discard(hold)
        _thread.on_references = None


@functools.lru_cache(maxsize=256)
def _constant(value: int, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=torch.int32, device=device)


def constant(value: int, device: torch.device) -> Tensor:
    """Return a 0-d int32 tensor that nobody may write to. A second call costs no launch."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.full((), value, dtype=torch.int32, device=device)
    return _constant(value, device)
