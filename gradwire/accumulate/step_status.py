"""Steps that the optimiser takes, and steps that it skips."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwire.accumulate.delivery import Pending
from gradwire.torch_internals import overflows_of, scale_of


class StepStatus:
    """Record of the last step: did the optimiser take it? The answer is decided on the device.

    A step counts as skipped in three cases:
    - the user said so;
    - a bundle came back NaN;
    - the GradScaler found an infinite gradient and the optimiser, if it is known, did not step.

    The scale itself tells nothing, because the user may set it at any time.
    """

    def __init__(self, scaler: Any, optimizer: Optimizer | None) -> None:
        self.scaler = scaler
        self.optimizer_watch: OptimizerWatch | None = None
        """Records if this optimiser stepped. Needed because a scaler that serves several
        optimisers does not say which of them stepped.
        """
        self.by_user = False
        """True: the user said that this step is skipped."""
        self.scale: Tensor | None = None
        """The GradScaler's scale in this step."""
        self._optimizer = optimizer
        self._found: Mapping[int, Mapping[str, Any]] = {}
        """The scaler's notes about each optimiser, up to the next update of the scale. The scaler
        then begins a new mapping and leaves this one unchanged.
        """
        self._old_scale: Tensor | None = None
        """The scale that an old checkpoint recorded instead of the fate of its last step."""

    def open(self, device: torch.device) -> None:
        """Prepare for steps on this device."""
        self._device = device
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped = torch.zeros((), dtype=torch.bool, device=device)
        """True (0-d): the previous step was skipped, as far as was known when this step began."""
        if self._optimizer is not None:
            self.optimizer_watch = OptimizerWatch(self._optimizer, device)

    def begin(self, pending: Sequence[Pending]) -> None:
        """Note that a step begins; `pending` is the deliveries of the last step."""
        self.skipped = self.last_was_skipped(pending)
        self.count += self.skipped
        self.by_user = False
        if self.optimizer_watch is not None:
            self.optimizer_watch.stepped.zero_()
        self.scale = self._current_scale()
        self._old_scale = None
        if self._is_on:
            self._found = overflows_of(self.scaler)

    def handshake_settings(self) -> dict[str, object]:
        """Return the settings that ranks compare in their handshake."""
        return {"scaler": self._is_on, "optimizer": self._optimizer is not None}

    def resume(self, skipped: bool, scale: Tensor | None = None) -> None:
        """Go on after the last step of a checkpoint; `skipped` tells the fate of that step.

        Old checkpoints hold only the scale in that step, and a flag that the optimiser has stepped.
        """
        self.by_user, self._found, self._old_scale = skipped, {}, scale

    @property
    def _is_on(self) -> bool:
        return self.scaler is not None and bool(self.scaler.is_enabled())

    def last_was_skipped(self, pending: Sequence[Pending]) -> Tensor:
        """Return True (0-d) if the last step was skipped, as far as is known by now."""
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
        """Return True (0-d) if the scaler found an infinite gradient; None if it never looked.

        With several optimisers the scaler adds up its findings. A step of this optimiser then
        counts more than the sum.
        """
        if self._old_scale is not None:
            scale = self._current_scale()
            return None if scale is None else scale < self._old_scale
        known = self._optimizer
        infinities = [
            value.to(self._device, torch.float32)
            for owner, state in self._found.items()
            if known is None or owner == id(known)
            for value in state["found_inf_per_device"].values()
        ]
        return torch.stack(infinities).sum() > 0 if infinities else None

    def _current_scale(self) -> Tensor | None:
        """Return a copy of the GradScaler's scale on the device; the original changes in place."""
        if not self._is_on:
            return None
        scale = scale_of(self.scaler)
        return None if scale is None else scale.detach().to(self._device, torch.float32).clone()

    def close(self) -> None:
        """Stop watching the optimiser."""
        if self.optimizer_watch is not None:
            self.optimizer_watch.remove()


class OptimizerWatch:
    """Watch on one optimiser; it records that the optimiser steps.

    A GradScaler that serves several optimisers does not say which of them stepped.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.stepped = torch.zeros((), dtype=torch.bool, device=device)
        """True (0-d): the optimiser has stepped since the last exchange."""
        self._handle = optimizer.register_step_post_hook(functools.partial(_note, self.stepped))

    def remove(self) -> None:
        self._handle.remove()


def _note(flag: Tensor, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # A fused optimiser is called in any case. The scaler hands it `found_inf`, and it skips alone.
    infinite = getattr(optimizer, "found_inf", None)
    if infinite is None:
        flag.fill_(True)
    else:
        flag.copy_((infinite == 0).all())
