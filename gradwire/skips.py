"""Whether the optimiser takes the steps that it is given."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwire.types import Delivered


class Skips:
    """What became of the last step, and how many were passed over: decided on the device.

    Either the user said so, or a bundle came back NaN, or the GradScaler has lowered its scale,
    which it does exactly when it found an infinite gradient anywhere, and the optimiser did not
    step, if it is known.
    """

    def __init__(self, scaler: Any, optimizer: Optimizer | None) -> None:
        self.scaler = scaler
        self.taken: Taken | None = None
        """Looks on whether that optimiser steps, where the scaler serves others too."""
        self.by_user = False
        self.scale: Tensor | None = None
        """The scaler's, in this step."""
        self._optimizer = optimizer

    def open(self, device: torch.device) -> None:
        self._device = device
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.before = torch.zeros((), dtype=torch.bool, device=device)
        """Whether the step before this one was skipped, as this one found when it began."""
        if self._optimizer is not None:
            self.taken = Taken(self._optimizer, device)

    def begin(self, delivered: Sequence[Delivered]) -> None:
        """Another step begins, after one that delivered this."""
        self.before = self.now(delivered)
        self.count += self.before
        self.by_user = False
        if self.taken is not None:
            self.taken.flag.zero_()
        self.scale = self._current_scale()

    def now(self, delivered: Sequence[Delivered]) -> Tensor:
        """Whether the last step was skipped, as far as it is known by now (0-d bool)."""
        if not delivered:
            return torch.zeros((), dtype=torch.bool, device=self._device)
        skipped = ~torch.stack([d.ok for d in delivered]).all()
        if self.by_user:
            skipped = torch.ones_like(skipped)
        now = self._current_scale()
        if now is not None and self.scale is not None:
            fell = now < self.scale
            skipped = skipped | (fell if self.taken is None else fell & ~self.taken.flag)
        return skipped

    def _current_scale(self) -> Tensor | None:
        """A copy of the GradScaler's scale, on the device; it changes in place."""
        if self.scaler is None or not self.scaler.is_enabled():
            return None
        scale = self.scaler._scale
        return None if scale is None else scale.detach().to(self._device, torch.float32).clone()

    def close(self) -> None:
        if self.taken is not None:
            self.taken.remove()


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
