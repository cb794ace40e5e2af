"""Launch a kernel, by Triton or past it.

Triton looks at every argument of every launch to find the right compilation. With REUSE a short key
is derived from the arguments instead. After the first launch with a key Triton is not asked again:
at bucket sizes that is half of the step.

`tests/kernels/test_launch.py` compares the keys with Triton's own specialisation.
"""

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from gradwire.torch_internals import (
    current_device,
    kernel_function,
    kernel_options,
    relaunch,
)

# On AMD Triton compiles for the size of the storage, too, which the keys do not hold.
REUSE = torch.version.hip is None
"""True: compilations are reused by key. It changes the time of small sizes, but no result."""

_INT32 = 2**31


@functools.cache
def overtakes(device: int) -> bool:
    """Return True if a kernel can begin on that CUDA device before the one before it has ended."""
    return (
        device >= 0
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


class Launcher:
    """A kernel with its launch options.

    Its arguments are of four kinds.
    Integers are in the kernel's do_not_specialize, and never bool.
    `fixed` names floats, and tensors whose alignment never changes and whose dtype follows from
    other arguments. Most of these tensors are new allocations. The others are constexpr, or tensors
    of any dtype and alignment. Tensors and `fixed` may be None. A constexpr that is a dtype of
    Triton is named DTYPE. Tensors in do_not_specialize_on_alignment have one entry, which may lie
    anywhere.

    overlap_launch: launch the kernel while the one before it runs, if the device can do it. That
    saves a microsecond. The kernel's last argument, a constexpr that the launcher adds, is then
    True. The kernel must call `gdc_wait` before it touches memory.
    """

    def __init__(
        self, kernel: Any, fixed: str = "", overlap_launch: bool = False, **options: Any
    ) -> None:
        self._kernel = kernel
        self._overlap_launch = overlap_launch
        self._options = options
        self._launches: dict[Hashable, Callable[..., None]] = {}
        self.fixed = fixed.split()
        self.key = _key_function(kernel, self.fixed)

    def __call__(self, grid: int, on: Tensor, *args: Any) -> None:
        """Launch `grid` programs on the current stream of the device of `on`."""
        device = on.get_device()
        if device >= 0 and device != current_device():
            with torch.cuda.device(device):
                return self(grid, on, *args)
        if self._overlap_launch:
            args = (*args, overtakes(device))
        key = self.key(device, *args)
        launch = self._launches.get(key)
        if launch is None:
            # Triton's interpreter returns None, and nothing is kept.
            overlap = {"launch_pdl": True} if self._overlap_launch and overtakes(device) else {}
            compiled = self._kernel[(grid,)](*args, **self._options, **overlap)
            if REUSE and compiled is not None:
                self._launches[key] = relaunch(compiled)
            return
        launch(grid, device, *args)


def _key_function(kernel: Any, fixed: list[str]) -> Callable[..., Hashable]:
    """Return the function of (device, *arguments) whose result tells compilations apart.

    It is generated once per kernel, as Triton generates its own: a loop over thirty arguments would
    take longer than the rest of a launch.
    """
    function = kernel_function(kernel)
    parameters, options = inspect.signature(function).parameters, kernel_options(kernel)
    integers = list(options.get("do_not_specialize") or ())
    anywhere = list(options.get("do_not_specialize_on_alignment") or ())
    unknown = {*fixed, *integers, *anywhere} - set(parameters)
    assert not unknown, f"{function.__name__} has no {unknown}"
    parts = ["_device"]
    for name, parameter in parameters.items():
        if parameter.annotation in (tl.constexpr, "tl.constexpr"):
            # Triton hashes its dtypes in Python: the name is as good, and quicker.
            parts.append(f"{name}.name" if name == "DTYPE" else name)
        elif name in fixed:
            parts.append(f"{name} is None")
        elif name in anywhere:
            parts.append(f"None if {name} is None else {name}.dtype")
        elif name not in integers:
            parts.append(f"None if {name} is None else {name}.dtype")
            parts.append(f"None if {name} is None else {name}.data_ptr() % 16 == 0")
    if integers:
        # Triton has types of 32 and of 64 bits. All but a few integers are below 2^31: their bits
        # together tell.
        each = [f"({n} < -{_INT32}) + ({n} >= {_INT32}) + ({n} >= {2**63})" for n in integers]
        small = f"0 <= {' | '.join(integers)} < {_INT32}"
        parts.append(f"{small} or not any(_wide := ({', '.join(each)},)) or _wide")
    return eval(f"lambda _device, {', '.join(parameters)}: ({', '.join(parts)},)")
