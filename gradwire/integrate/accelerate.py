"""attach for Accelerate: one line after `accelerator.prepare`."""

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
from gradwire.integrate.adam import refuse_for_recipe, warn_of_adam
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

    This is a collective call; the fields are Config's. Afterwards `accelerator.save_state(folder)`
    also writes every rank's part into folder/gradwire. `accelerator.load_state` reads the parts, on
    any number of ranks; call it after attach. Call `wire.close()` before
    `accelerator.end_training()`.
    """
    prepared = weakref.ref(_prepared_module(accelerator, model))
    parameters = {id(parameter) for parameter in model.parameters()}
    optimizers = [o for o in accelerator._optimizers if parameters & _parameters_of(o)]
    refuse_for_recipe(fields, optimizers)
    wire = ddp.attach(model, config, scaler=accelerator.scaler, **fields)
    warn_of_adam(wire, optimizers)
    accelerator.register_save_state_pre_hook(functools.partial(_save, wire, prepared))
    accelerator.register_load_state_pre_hook(functools.partial(_load, wire, prepared))
    accelerator.register_for_checkpointing(_StepMark(wire))
    return wire


class _StepMark:
    """An object in Accelerate's checkpoint that ties the checkpoint to the step of the residuals.

    Accelerate compares the number of saved objects with the number of registered ones. It therefore
    refuses a checkpoint with residuals if no wire is attached to load them.
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
    if (part := _part_folder(folder, prepared, models)) is not None:
        checkpoint.save(wire, part)


def _load(
    wire: Attached, prepared: "weakref.ref[nn.Module]", models: list[nn.Module], folder: str
) -> None:
    if (part := _part_folder(folder, prepared, models)) is None:
        return
    if not (part / checkpoint.MANIFEST).is_file():
        raise StateError(
            f"{part} is not there: the checkpoint was written without gradwire. Call load_state "
            f"before attach, and residuals start at zero"
        )
    checkpoint.load(wire, part)


def _part_folder(
    folder: str, prepared: "weakref.ref[nn.Module]", models: list[nn.Module]
) -> Path | None:
    """Return the folder of this model's part, or None if Accelerate has freed the model.

    Accelerate numbers its models, and the folder takes the same number.
    """
    number = next((i for i, m in enumerate(models) if m is prepared()), None)
    if number is None:
        return None
    return Path(folder) / (f"gradwire_{number}" if number else "gradwire")


def _parameters_of(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _prepared_module(accelerator: object, model: object) -> nn.Module:
    """Return the module inside DDP, under which Accelerate lists the model, or raise."""
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
