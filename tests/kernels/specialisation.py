"""Triton's own choice of a compilation, to compare the keys of `Launcher` with."""

import functools

from tests.kernels.triton_device import DEVICE  # isort: skip
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, create_function_from_signature

assert DEVICE


@functools.cache
def _binder(kernel):
    # The interpreter's stand-in for a kernel keeps the options of `triton.jit`.
    jitted = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    return create_function_from_signature(jitted.signature, jitted.params, backend)


def bind(kernel, args):
    """Return the arguments by name, and of each its type and alignment, or that it is constant."""
    return _binder(kernel)(*args)[:2]


def specialisation(kernel, args):
    """Return the types, constants and alignments that Triton would compile `kernel` for."""
    return str(bind(kernel, args)[1])
