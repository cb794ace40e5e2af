"""Launching a kernel, by Triton or past it.

Triton looks at every argument of every launch to find the right compilation. With REUSE the caller
names it, and after the first launch nothing is looked at: at bucket sizes that is half of the step.
"""

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

REUSE = True
"""Results do not depend on it, the time of small sizes does."""


def aligned(*tensors: Tensor) -> tuple[bool, ...]:
    """Which of them begin at a multiple of 16: Triton compiles for that, argument by argument."""
    return tuple([tensor.data_ptr() % 16 == 0 for tensor in tensors])


@functools.cache
def overtakes(device: int) -> bool:
    """Whether a kernel can begin on that CUDA device before the one before it has ended."""
    return (
        device >= 0
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


class Launcher:
    """A kernel with its launch options.

    `key` must tell compilations apart: it holds all constexpr arguments, the dtypes, which
    arguments are None and which addresses are not multiples of 16. Integer arguments must be in the
    kernel's do_not_specialize.

    overlap_launch: the kernel is launched while the one before it runs, where the device can do it,
    which saves a microsecond. Its last argument, a constexpr that is given here, says so: it must
    then call `gdc_wait` before it touches memory.
    """

    def __init__(self, kernel: Any, overlap_launch: bool = False, **options: Any) -> None:
        self._kernel = kernel
        self._overlap_launch = overlap_launch
        self._options = options
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, grid: int, key: Hashable, on: Tensor, *args: Any) -> None:
        """Launch `grid` programs on the current stream of the device of `on`."""
        device = on.get_device()
        if device >= 0 and device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self(grid, key, on, *args)
        if self._overlap_launch:
            args = (*args, overtakes(device))
        compiled = self._compiled.get((device, key))
        if compiled is None:
            # Triton's interpreter returns None, and nothing is kept.
            early = {"launch_pdl": True} if self._overlap_launch and overtakes(device) else {}
            compiled = self._kernel[(grid,)](*args, **self._options, **early)
            if REUSE and compiled is not None:
                self._compiled[device, key] = compiled
            return
        stream = driver.active.get_current_stream(device)
        # The three None are the hooks of a profiler, which nobody uses here.
        compiled.run(
            grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *args
        )
