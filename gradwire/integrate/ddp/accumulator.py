"""Accumulator: the node of autograd on which DDP's hook of a parameter sits.

`model.to(dtype)` and `model.to(device)` give every parameter a new node, also if the model comes
back to the old dtype. DDP's hooks stay on the old nodes. DDP then averages nothing, without a word.
"""

import weakref
from collections.abc import Callable

from torch import Tensor
from torch.autograd.graph import get_gradient_edge


class Accumulator:
    """A watch on one parameter's node; it calls `lost` in a backward pass with another node."""

    def __init__(self, parameter: Tensor, lost: Callable[[], None]) -> None:
        node = get_gradient_edge(parameter).node
        method = weakref.WeakMethod(lost)

        # DDP keeps the node, and the hook must not keep the engine.
        def check(parameter: Tensor) -> None:
            call = method()
            if call is not None and get_gradient_edge(parameter).node is not node:
                call()

        self._handle = parameter.register_post_accumulate_grad_hook(check)

    def remove(self) -> None:
        """Stop watching."""
        self._handle.remove()
