"""attach for Transformers: one line after the Trainer is made."""

import functools
import logging
from pathlib import Path
from typing import Any, cast

from torch.nn.parallel import DistributedDataParallel

from gradwire.config import Config
from gradwire.errors import AttachError, StateError
from gradwire.integrate import ddp
from gradwire.integrate.adam import refuse_for_recipe, warn_of_adam
from gradwire.integrate.ddp import Wire
from gradwire.integrate.versions import require
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


class GradwireCallback(TrainerCallback):
    """The callback that attaches to the Trainer's wrapped model, and saves with the Trainer.

    `attach` makes it.
    """

    def __init__(self, trainer: Trainer, config: Config | None, fields: dict[str, Any]) -> None:
        self._trainer = trainer
        self._config, self._fields = config, fields
        self._resume: str | bool | None = None
        self.wire: Wire | None = None

    def note_resume(self, train: Any) -> Any:
        """Return `train` with a note of its argument `resume_from_checkpoint`."""

        @functools.wraps(train)
        def train_from(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._resume = resume_from_checkpoint
            return train(resume_from_checkpoint, *args, **kwargs)

        return train_from

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Attach, and load the residuals of the checkpoint that training resumes from."""
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
        # A second `train` keeps the wrapped model, so the wire and its residuals stay too.
        if self.wire is None or self.wire.ddp() is not uncompiled(model):
            refuse_for_recipe(self._fields, [self._trainer.optimizer])
            scaler = self._trainer.accelerator.scaler
            wire = ddp.attach(model, self._config, scaler=scaler, **self._fields)
            self.wire = cast(Wire, wire)
            warn_of_adam(wire, [self._trainer.optimizer])
        if self._resume:
            self._load(args.output_dir, state)
        if not args.save_only_model:
            state.stateful_callbacks[_KEY] = {"args": {}, "attributes": {}}

    def _load(self, output: str, state: Any) -> None:
        folder = get_last_checkpoint(output) if self._resume is True else str(self._resume)
        part = Path(str(folder)) / _KEY
        assert self.wire is not None
        if _KEY not in state.stateful_callbacks:
            if self.wire.steps:
                raise StateError(
                    f"{folder} was written without gradwire, and this Trainer has residuals of "
                    f"{self.wire.steps} steps: make a new Trainer to resume from it"
                )
            log.warning("%s was written without gradwire: residuals start at zero", folder)
            return
        if not (part / checkpoint.MANIFEST).is_file():
            raise StateError(
                f"{folder} was written with gradwire, but {part} is not there: the run was "
                f"stopped while it saved; resume from an older checkpoint"
            )
        checkpoint.load(self.wire, part)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save every rank's part beside the optimiser's."""
        if self.wire is not None and not args.save_only_model:
            name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            checkpoint.save(self.wire, Path(args.output_dir) / name / _KEY)


def _refuse_trainer(trainer: object) -> None:
    """Raise AttachError for a Trainer that does not use plain DDP on several ranks."""
    if not isinstance(trainer, Trainer):
        raise AttachError(
            f"attach needs a transformers.Trainer, got {type(trainer).__name__}: "
            f"attach(trainer, density=0.001)"
        )
    if any(isinstance(c, GradwireCallback) for c in trainer.callback_handler.callbacks):
        raise AttachError("this Trainer has a GradwireCallback already: attach once")
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
