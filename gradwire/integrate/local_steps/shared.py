"""shared: the weights that all ranks share, for a while in place of this rank's own."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from gradwire.integrate.local_steps import LocalSteps


@contextlib.contextmanager
def shared(local: "LocalSteps") -> Iterator[None]:
    """Put x into the model, and put the rank's own weights and buffers back, bit by bit."""
    local.refuse_shared("shared")
    own = local.parts.memory()
    kept = {name: tensor.detach().clone() for name, tensor in own.items()}
    local.is_shared = True
    try:
        # All at once where the island sends one message, else one after the other, to save memory.
        names = [list(local.reference)] if local.parts.puts_together else zip(local.reference)
        for some in names:
            local.parts.put({name: local.reference[name].to(local.device) for name in some})
        local.parts.refresh()
        yield
    finally:
        local.is_shared = False
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(kept[name])
        local.parts.refresh()
