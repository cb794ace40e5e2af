"""Whether an optimiser took a step that a GradScaler may have skipped."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Taken:
    """Looks on while an optimiser steps.

    Of a GradScaler that serves several, the scale only tells that one of them was passed over.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.flag = torch.zeros((), dtype=torch.bool, device=device)
        """Whether it has stepped since the last exchange."""
        self._handle = optimizer.register_step_post_hook(functools.partial(_note, self.flag))

    def remove(self) -> None:
        self._handle.remove()


def _note(flag: Tensor, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # A fused optimiser is called in any case, and told what the scaler found.
    found = getattr(optimizer, "found_inf", None)
    if found is None:
        flag.fill_(True)
    else:
        flag.copy_((found == 0).all())
