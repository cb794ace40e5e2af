"""attach and local_steps for Transformers: one line after the Trainer is made."""

import functools
import logging
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

from torch.nn.parallel import DistributedDataParallel

from gradwire.config import Config
from gradwire.errors import AttachError, StateError
from gradwire.integrate import ddp
from gradwire.integrate.adam import refuse_for_recipe, warn_of_adam
from gradwire.integrate.ddp import Wire
from gradwire.integrate.ddp.alone import end_alone, leave_alone
from gradwire.integrate.local_steps import LocalSteps
from gradwire.integrate.local_steps import local_steps as make_local_steps
from gradwire.integrate.local_steps.arguments import read_arguments
from gradwire.integrate.versions import require
from gradwire.optim import muon
from gradwire.state.saved import folder as checkpoint
from gradwire.torch_internals import uncompiled

require("transformers")
require("accelerate")

from transformers import Trainer, TrainerCallback  # noqa: E402
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint  # noqa: E402

log = logging.getLogger("gradwire")
_KEY = "gradwire"
"""The folder in a checkpoint, and the note in the Trainer's state that the folder was written."""


def attach(trainer: Trainer, config: Config | None = None, **fields: Any) -> "GradwireCallback":
    """Compress the gradient exchange of a Transformers Trainer.

        trainer = Trainer(model, args, train_dataset=data)
        callback = attach(trainer, method="topk", density=0.001)
        trainer.train()

    The fields are those of `gradwire.attach`. Set optim="sgd" in TrainingArguments. The Trainer's
    default is AdamW, with which a sparse method ruins the training, and attach warns of it.

    `callback.wire` is the wire, from the start of `train` on. Every checkpoint-N holds a folder
    gradwire with every rank's part. `trainer.train(resume_from_checkpoint=...)` reads these parts,
    on any number of ranks.
    """
    _refuse_trainer(trainer)
    ddp.check_fields(config, fields)
    callback = GradwireCallback(trainer, config, fields)
    trainer.add_callback(callback)
    # The Trainer does not tell callbacks the checkpoint from which training resumes.
    trainer.train = callback.note_resume(trainer.train)
    return callback


def local_steps(
    trainer: Trainer, config: Config | None = None, **arguments: Any
) -> "LocalStepsCallback":
    """Let every rank of a Transformers Trainer train on its own, and exchange weights in rounds.

        trainer = Trainer(model, args, train_dataset=data)
        callback = local_steps(trainer, recipe="muon")
        trainer.train()

    The arguments are those of `gradwire.local_steps`. With a recipe, a Trainer that was given no
    optimiser gets `gradwire.optim.muon` with the learning rate, weight decay and betas of its
    TrainingArguments. Without a recipe it keeps its own.

    `callback.local` is the handle, from the start of `train` on. The Trainer evaluates, predicts
    and saves the weights that all ranks share. At the end of `train` the model has these weights.
    Every checkpoint-N holds a folder gradwire with every rank's part: its own weights and optimiser
    too.
    """
    _refuse_trainer(trainer)
    settings = read_arguments(config, arguments)
    if settings.recipe and trainer.optimizer is None:
        _give_muon(trainer)
    callback = LocalStepsCallback(trainer, config, arguments)
    trainer.add_callback(callback)
    trainer.train = callback.note_resume(trainer.train)
    for name in ("evaluate", "predict", "save_model"):
        setattr(trainer, name, callback.with_shared(getattr(trainer, name)))
    return callback


def _give_muon(trainer: Trainer) -> None:
    """Make the optimiser of the recipes, and say so."""
    if trainer.model_init is not None:
        raise AttachError(
            "with model_init the Trainer makes its model later: give it the optimiser of that "
            "model, or the model"
        )
    args = trainer.args
    settings = {
        "lr": args.learning_rate,
        "weight_decay": args.weight_decay,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
    trainer.optimizer = muon(trainer.model, **settings)
    if trainer.is_world_process_zero():
        words = ", ".join(f"{name}={value}" for name, value in settings.items())
        print(f"gradwire: the Trainer's optimiser is gradwire.optim.muon({words})", file=sys.stderr)


class _Callback(TrainerCallback):
    """The callback that opens a handle on the Trainer's model, and saves with the Trainer."""

    def __init__(self, trainer: Trainer, config: Config | None, fields: dict[str, Any]) -> None:
        self._trainer = trainer
        self._config, self._fields = config, fields
        self._resume: str | bool | None = None

    @property
    def _handle(self) -> Wire | LocalSteps | None:
        """The handle that is saved; None before the first `train`."""
        raise NotImplementedError

    def _open(self, model: Any) -> None:
        """Make the handle for the Trainer's wrapped model, unless it is there."""
        raise NotImplementedError

    def note_resume(self, train: Any) -> Any:
        """Return `train` with a note of its argument `resume_from_checkpoint`."""

        @functools.wraps(train)
        def train_from(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._resume = resume_from_checkpoint
            return train(resume_from_checkpoint, *args, **kwargs)

        return train_from

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Open the handle, and load the parts of the checkpoint that training resumes from."""
        # This is the first event after the Trainer has wrapped the model and loaded the optimiser.
        if state.is_hyper_param_search:
            raise AttachError(
                "hyperparameter_search is not supported: its trials would share one residual; "
                "search without gradwire and attach for the training"
            )
        model = self._trainer.model_wrapped
        if not isinstance(uncompiled(model), DistributedDataParallel):
            raise AttachError(
                f"the Trainer made a {type(model).__name__} of its model, attach needs "
                f"DistributedDataParallel: start with torchrun, without fsdp or deepspeed"
            )
        self._open(model)
        if self._resume:
            self._load(args.output_dir, state)
        if not args.save_only_model:
            state.stateful_callbacks[_KEY] = {"args": {}, "attributes": {}}

    def _load(self, output: str, state: Any) -> None:
        folder = get_last_checkpoint(output) if self._resume is True else str(self._resume)
        part, handle = Path(str(folder)) / _KEY, self._handle
        assert handle is not None
        if _KEY not in state.stateful_callbacks:
            if handle.steps:
                raise StateError(
                    f"{folder} was written without gradwire, and this Trainer has residuals of "
                    f"{handle.steps} steps: make a new Trainer to resume from it"
                )
            log.warning("%s was written without gradwire: residuals start at zero", folder)
            return
        if not (part / checkpoint.MANIFEST).is_file():
            raise StateError(
                f"{folder} was written with gradwire, but {part} is not there: the run was "
                f"stopped while it saved; resume from an older checkpoint"
            )
        checkpoint.load(handle, part)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save every rank's part beside the optimiser's."""
        if self._handle is not None and not args.save_only_model:
            name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            checkpoint.save(self._handle, Path(args.output_dir) / name / _KEY)


class GradwireCallback(_Callback):
    """The callback of `attach`; `wire` is the wire, None before the first `train`."""

    wire: Wire | None = None

    @property
    def _handle(self) -> Wire | None:
        return self.wire

    def _open(self, model: Any) -> None:
        # A second `train` keeps the wrapped model, so the wire and its residuals stay too.
        if self.wire is None or self.wire.ddp() is not uncompiled(model):
            refuse_for_recipe(self._fields, [self._trainer.optimizer])
            scaler = self._trainer.accelerator.scaler
            wire = ddp.attach(model, self._config, scaler=scaler, **self._fields)
            self.wire = cast(Wire, wire)
            warn_of_adam(wire, [self._trainer.optimizer])


class LocalStepsCallback(_Callback):
    """The callback of `local_steps`; `local` is the handle, None before the first `train`."""

    local: LocalSteps | None = None
    _is_training = False

    @property
    def _handle(self) -> LocalSteps | None:
        return self.local

    def _open(self, model: Any) -> None:
        own, optimizer = leave_alone(model), self._trainer.optimizer
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        if self.local is None or self.local.model is not own:
            self.local = make_local_steps(own, optimizer, config=self._config, **self._fields)
        else:
            self.local.optimizers = [optimizer]
        self._is_training = True

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count an inner step; every few steps ranks exchange."""
        # A GradScaler skips a step on one rank alone. The Trainer tells of that step too.
        assert self.local is not None
        self.local.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the shared weights in the model, unless the Trainer has put its best ones there."""
        assert self.local is not None
        self._is_training = False
        if not args.load_best_model_at_end:
            end_alone(self.local)

    def with_shared(self, function: Any) -> Any:
        """Return a method of the Trainer that sees the weights that all ranks share."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._shared():
                return function(*args, **kwargs)

        return call

    def _shared(self) -> AbstractContextManager[None]:
        if self.local is None or not self._is_training or self.local.is_shared:
            return nullcontext()
        return self.local.shared()


def _refuse_trainer(trainer: object) -> None:
    """Raise AttachError for a Trainer that does not use plain DDP on several ranks."""
    if not isinstance(trainer, Trainer):
        raise AttachError(
            f"attach needs a transformers.Trainer, got {type(trainer).__name__}: "
            f"attach(trainer, density=0.001)"
        )
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, _Callback):
            raise AttachError(
                f"this Trainer has a {type(callback).__name__} already: attach once, or use local "
                f"steps"
            )
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        wrapper = "DeepSpeed" if trainer.is_deepspeed_enabled else "FSDP"
        raise AttachError(
            f"this Trainer uses {wrapper}, attach needs DistributedDataParallel: leave deepspeed "
            f"and fsdp out of TrainingArguments"
        )
    if trainer.args.world_size == 1:
        raise AttachError(
            "the Trainer runs one process here, so there is nothing to exchange: start the script "
            "with torchrun --nproc-per-node 2, or leave attach out"
        )
