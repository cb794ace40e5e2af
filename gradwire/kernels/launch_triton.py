"""Launching a kernel, by Triton or past it.

Triton looks at every argument of every launch to find the right compilation. With REUSE the caller
names it, and after the first launch nothing is looked at: at bucket sizes that is half of the step.
"""

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


class Launcher:
    """A kernel with its launch options.

    `key` must tell compilations apart: it holds all constexpr arguments, the dtypes, which
    arguments are None and which addresses are not multiples of 16. Integer arguments must be in the
    kernel's do_not_specialize.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel = kernel
        self._options = options
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, grid: int, key: Hashable, on: Tensor, *args: Any) -> None:
        """Launch `grid` programs on the current stream of the device of `on`."""
        device = on.get_device()
        if device >= 0 and device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self(grid, key, on, *args)
        compiled = self._compiled.get((device, key))
        if compiled is None:
            # Triton's interpreter returns None, and nothing is kept.
            compiled = self._kernel[(grid,)](*args, **self._options)
            if REUSE and compiled is not None:
                self._compiled[device, key] = compiled
            return
        stream = driver.active.get_current_stream(device)
        # The three None are the hooks of a profiler, which nobody uses here.
        compiled.run(
            grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *args
        )
