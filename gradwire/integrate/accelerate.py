"""attach and local_steps for Accelerate: one line after `accelerator.prepare`."""

import functools
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.config import Config
from gradwire.errors import AttachError, StateError
from gradwire.integrate import ddp
from gradwire.integrate.adam import refuse_for_recipe, warn_of_adam
from gradwire.integrate.attached import Attached
from gradwire.integrate.ddp.alone import leave_alone
from gradwire.integrate.local_steps import LocalSteps
from gradwire.integrate.local_steps import local_steps as make_local_steps
from gradwire.integrate.versions import require
from gradwire.state.saved import folder as checkpoint
from gradwire.torch_internals import uncompiled

require("accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402


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


def local_steps(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    config: Config | None = None,
    **arguments: Any,
) -> LocalSteps:
    """Let every rank train on its own, and exchange weights in rounds.

        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        local = local_steps(accelerator, model, optimizer, recipe="muon")

    This is a collective call; the arguments are those of `gradwire.local_steps`. The optimiser is
    the prepared one, or a list of these. Their steps are counted, so that the loop stays as it is.
    Of several optimisers the last one is stepped last.

    `accelerator.save_state(folder)` writes the weights that all ranks share, and every rank's part
    into folder/gradwire: its own weights and optimiser too. `accelerator.load_state` reads the
    parts. Evaluate inside `with local.shared()`.
    """
    prepared = weakref.ref(_prepared_module(accelerator, model))
    wrapped = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    for each in wrapped:
        if not isinstance(each, AcceleratedOptimizer):
            raise AttachError(
                f"this {type(each).__name__} is not prepared: call model, optimizer = "
                f"accelerator.prepare(model, optimizer) first"
            )
    own = leave_alone(model)
    inner = [each.optimizer for each in wrapped]
    local = make_local_steps(own, inner, config=config, **arguments)
    _count_steps(wrapped[-1], local)
    mark = _LocalMark(local)
    accelerator.register_save_state_pre_hook(functools.partial(_save_local, local, prepared))
    accelerator.register_load_state_pre_hook(functools.partial(mark.note, prepared))
    accelerator.register_for_checkpointing(mark)
    return local


def _count_steps(optimizer: AcceleratedOptimizer, local: LocalSteps) -> None:
    """Let every step of a prepared optimiser count as an inner step.

    A GradScaler may skip a step on one rank alone. It counts too, because ranks count alike.
    """
    step = optimizer.step

    @functools.wraps(step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if optimizer.gradient_state.sync_gradients:
            local.step()
        return result

    optimizer.step = counted


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


class _LocalMark:
    """An object in Accelerate's checkpoint that loads the parts of local steps.

    Accelerate loads such objects last, after it has given every rank the same weights and moments.
    """

    def __init__(self, local: LocalSteps) -> None:
        self._local = local
        self._part: Path | None = None

    def note(
        self, prepared: "weakref.ref[nn.Module]", models: list[nn.Module], folder: str
    ) -> None:
        """Note the folder that is about to be loaded."""
        self._part = _found_part(folder, prepared, models)

    def state_dict(self) -> dict[str, Any]:
        return {"gradwire": self._local.steps}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        if self._part is not None:
            checkpoint.load(self._local, self._part)


def _save_local(
    local: LocalSteps,
    prepared: "weakref.ref[nn.Module]",
    models: list[nn.Module],
    weights: list[dict[str, Any]],
    folder: str,
) -> None:
    part = _part_folder(folder, prepared, models)
    if part is None:
        return
    number = next(i for i, model in enumerate(models) if model is prepared())
    shared, state = local.shared_weights(), weights[number]
    # Tied weights have several names in a state, and one in the model.
    places = {own.data_ptr(): shared[name] for name, own in local.weights.items()}
    for name, tensor in state.items():
        if tensor.data_ptr() in places and tensor.numel():
            state[name] = places[tensor.data_ptr()].to(tensor.dtype)
    checkpoint.save(local, part)


def _save(
    wire: Attached, prepared: "weakref.ref[nn.Module]", models: list[nn.Module], _: Any, folder: str
) -> None:
    if (part := _part_folder(folder, prepared, models)) is not None:
        checkpoint.save(wire, part)


def _load(
    wire: Attached, prepared: "weakref.ref[nn.Module]", models: list[nn.Module], folder: str
) -> None:
    if (part := _found_part(folder, prepared, models)) is not None:
        checkpoint.load(wire, part)


def _found_part(
    folder: str, prepared: "weakref.ref[nn.Module]", models: list[nn.Module]
) -> Path | None:
    """Return the folder of this model's part, which must be there; None for a freed model."""
    part = _part_folder(folder, prepared, models)
    if part is not None and not (part / checkpoint.MANIFEST).is_file():
        raise StateError(
            f"{part} is not there: the checkpoint was written without gradwire. Call load_state "
            f"before attach, and residuals start at zero"
        )
    return part


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
