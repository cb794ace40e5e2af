"""Whether the optimiser takes the steps that it is given."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwire.accumulate.delivery import Pending


class StepStatus:
    """What became of the last step, and how many were passed over: decided on the device.

    Either the user said so, or a bundle came back NaN, or the GradScaler found an infinite gradient
    anywhere and the optimiser did not step, if it is known. The scale itself tells nothing: the
    user may set it at any time.
    """

    def __init__(self, scaler: Any, optimizer: Optimizer | None) -> None:
        self.scaler = scaler
        self.optimizer_watch: OptimizerWatch | None = None
        """Records if this optimiser stepped: a scaler that serves several does not say which."""
        self.by_user = False
        self.scale: Tensor | None = None
        """The scaler's, in this step."""
        self._optimizer = optimizer
        self._found: Mapping[int, Mapping[str, Any]] = {}
        """What the scaler notes of each optimiser until it updates its scale; it then begins a new
        one, and this one stays as it was."""
        self._old_scale: Tensor | None = None
        """Of a checkpoint that says no more than this of what became of its last step."""

    def open(self, device: torch.device) -> None:
        self._device = device
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.before = torch.zeros((), dtype=torch.bool, device=device)
        """Whether the step before this one was skipped, as this one found when it began."""
        if self._optimizer is not None:
            self.optimizer_watch = OptimizerWatch(self._optimizer, device)

    def begin(self, pending: Sequence[Pending]) -> None:
        """Note that a step begins; `pending` is what the last one delivered."""
        self.before = self.now(pending)
        self.count += self.before
        self.by_user = False
        if self.optimizer_watch is not None:
            self.optimizer_watch.stepped.zero_()
        self.scale = self._current_scale()
        self._old_scale = None
        if self._is_on:
            self._found = self.scaler._per_optimizer_states

    def told(self) -> dict[str, object]:
        """What ranks compare when they meet."""
        return {"scaler": self._is_on, "optimizer": self._optimizer is not None}

    def resume(self, skipped: bool, scale: Tensor | None = None) -> None:
        """Go on after a step of which a checkpoint says that it was skipped.

        Old ones say only the scale in that step, and whether the optimiser has stepped.
        """
        self.by_user, self._found, self._old_scale = skipped, {}, scale

    @property
    def _is_on(self) -> bool:
        return self.scaler is not None and bool(self.scaler.is_enabled())

    def now(self, pending: Sequence[Pending]) -> Tensor:
        """Whether the last step was skipped, as far as it is known by now (0-d bool)."""
        if not pending:
            return torch.zeros((), dtype=torch.bool, device=self._device)
        skipped = ~torch.stack([p.ok for p in pending]).all()
        if self.by_user:
            skipped = torch.ones_like(skipped)
        overflow = self._overflow()
        if overflow is not None:
            skipped = skipped | (
                overflow
                if self.optimizer_watch is None
                else overflow & ~self.optimizer_watch.stepped
            )
        return skipped

    def _overflow(self) -> Tensor | None:
        """Whether the scaler found an infinite gradient in the last step; None if it never looked.

        With several optimisers it adds up what it found: that this one stepped then counts more.
        """
        if self._old_scale is not None:
            now = self._current_scale()
            return None if now is None else now < self._old_scale
        known = self._optimizer
        found = [
            value.to(self._device, torch.float32)
            for owner, state in self._found.items()
            if known is None or owner == id(known)
            for value in state["found_inf_per_device"].values()
        ]
        return torch.stack(found).sum() > 0 if found else None

    def _current_scale(self) -> Tensor | None:
        """A copy of the GradScaler's scale, on the device; it changes in place."""
        if not self._is_on:
            return None
        scale = self.scaler._scale
        return None if scale is None else scale.detach().to(self._device, torch.float32).clone()

    def close(self) -> None:
        if self.optimizer_watch is not None:
            self.optimizer_watch.remove()


class OptimizerWatch:
    """Looks on while an optimiser steps.

    A GradScaler that serves several adds up what it found for each of them.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.stepped = torch.zeros((), dtype=torch.bool, device=device)
        """Whether it has stepped since the last exchange."""
        self._handle = optimizer.register_step_post_hook(functools.partial(_note, self.stepped))

    def remove(self) -> None:
        self._handle.remove()


def _note(flag: Tensor, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # A fused optimiser is called in any case, and told what the scaler found.
    found = getattr(optimizer, "found_inf", None)
    if found is None:
        flag.fill_(True)
    else:
        flag.copy_((found == 0).all())
