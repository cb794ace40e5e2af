"""Accelerate: one line after `accelerator.prepare`."""

import functools
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.config import Config
from gradwire.errors import AttachError, StateError
from gradwire.integrate import ddp
from gradwire.integrate.adam import warn_of_adam
from gradwire.integrate.attached import Attached
from gradwire.integrate.versions import require
from gradwire.state.saved import folder as checkpoint
from gradwire.torch_internals import uncompiled

require("accelerate")

from accelerate import Accelerator  # noqa: E402


def attach(
    accelerator: Accelerator, model: nn.Module, config: Config | None = None, **fields: Any
) -> Attached:
    """Compress the gradient exchange of a model that `accelerator` has prepared.

        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        wire = attach(accelerator, model, method="topk", density=0.001)

    A collective call; the fields are Config's. From here on `accelerator.save_state(folder)` writes
    every rank's part into folder/gradwire, and `accelerator.load_state` reads it, on any number of
    ranks: call it after this. Call `wire.close()` before `accelerator.end_training()`.
    """
    prepared = weakref.ref(_inner(accelerator, model))
    wire = ddp.attach(model, config, scaler=accelerator.scaler, **fields)
    own = {id(parameter) for parameter in model.parameters()}
    warn_of_adam(wire, (o for o in accelerator._optimizers if own & _parameters_of(o)))
    accelerator.register_save_state_pre_hook(functools.partial(_save, wire, prepared))
    accelerator.register_load_state_pre_hook(functools.partial(_load, wire, prepared))
    accelerator.register_for_checkpointing(_Mark(wire))
    return wire


class _Mark:
    """Makes Accelerate refuse a checkpoint with residuals when no wire is attached to take them.

    It compares the number of objects it saved with those that are registered.
    """

    def __init__(self, wire: Attached) -> None:
        self._wire = wire

    def state_dict(self) -> dict[str, Any]:
        return {"gradwire": self._wire.steps}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        if saved.get("gradwire") != self._wire.steps:
            raise StateError(
                f"the checkpoint is of step {saved.get('gradwire')!r}, its residuals of step "
                f"{self._wire.steps}: register objects and attach in the order of the run that "
                f"wrote it"
            )


def _save(
    wire: Attached, prepared: "weakref.ref[nn.Module]", models: list[nn.Module], _: Any, folder: str
) -> None:
    if (place := _place(folder, prepared, models)) is not None:
        checkpoint.save(wire, place)


def _load(
    wire: Attached, prepared: "weakref.ref[nn.Module]", models: list[nn.Module], folder: str
) -> None:
    if (place := _place(folder, prepared, models)) is None:
        return
    if not (place / checkpoint.MANIFEST).is_file():
        raise StateError(
            f"{place} is not there: the checkpoint was written without gradwire. Call load_state "
            f"before attach, and residuals start at zero"
        )
    checkpoint.load(wire, place)


def _place(folder: str, prepared: "weakref.ref[nn.Module]", models: list[nn.Module]) -> Path | None:
    """Where this model's part goes, by Accelerate's numbers; None once the model was let go of."""
    number = next((i for i, m in enumerate(models) if m is prepared()), None)
    if number is None:
        return None
    return Path(folder) / (f"gradwire_{number}" if number else "gradwire")


def _parameters_of(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _inner(accelerator: object, model: object) -> nn.Module:
    """The module inside DDP, by which Accelerate knows the model; anything else is refused."""
    if not isinstance(accelerator, Accelerator) or not isinstance(model, nn.Module):
        raise AttachError(
            f"attach needs an Accelerator and a model, got {type(accelerator).__name__} and "
            f"{type(model).__name__}: attach(accelerator, model, density=0.001)"
        )
    if accelerator.num_processes == 1:
        raise AttachError(
            "Accelerate runs one process here, so there is nothing to exchange: start the script "
            "with torchrun --nproc-per-node 2, or leave attach out"
        )
    module = uncompiled(model)
    if not getattr(model, "_is_accelerate_prepared", False):
        raise AttachError(
            f"this {type(model).__name__} is not prepared: call model = accelerator.prepare(model) "
            f"first, and attach to what it returns"
        )
    if not isinstance(module, DistributedDataParallel):
        raise AttachError(
            f"Accelerate made a {type(module).__name__} of the model, attach needs "
            f"DistributedDataParallel: configure neither FSDP, DeepSpeed nor Megatron"
        )
    if all(m is not module.module for m in accelerator._models):
        raise AttachError(
            "this model was prepared by another Accelerator: attach with that one, whose "
            "save_state saves it"
        )
    return module.module
