"""Which version of an op a device gets."""

import functools
import importlib.util
import warnings

import torch
from torch import Tensor


@functools.cache
def uses_triton(device: torch.device) -> bool:
    """Whether `device` runs the Triton kernels; warns once where it should and cannot."""
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
    """A 0-d int32 tensor that nobody may write to; a second call costs no launch."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.full((), value, dtype=torch.int32, device=device)
    return _constant(value, device)
