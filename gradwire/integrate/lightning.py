"""Strategies for Lightning, one argument of the Trainer: GradwireStrategy and LocalStepsStrategy.

They are strategies, because Lightning ignores communication hooks on a CPU. Lightning also tells a
strategy the path of every checkpoint on every rank, and does not tell a callback.
"""

import copy
import inspect
import logging
import os
import shutil
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.config import Config
from gradwire.errors import AttachError, ConfigError, StateError
from gradwire.integrate.adam import refuse_for_recipe, warn_of_adam
from gradwire.integrate.attached import Attached
from gradwire.integrate.ddp import attach, check_fields
from gradwire.integrate.ddp.alone import end_alone, leave_alone
from gradwire.integrate.local_steps import LocalSteps, local_steps
from gradwire.integrate.local_steps.arguments import read_arguments
from gradwire.integrate.versions import require
from gradwire.state.saved.folder import MANIFEST, load, save

require("lightning")

from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402

log = logging.getLogger("gradwire")
_KEY = "gradwire"
"""The entry of a checkpoint that says that residuals lie beside it."""
_HOOKS = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")
"""Options of DDPStrategy that would set DDP's only hook."""


class _WithParts(DDPStrategy):
    """Lightning's DDP strategy with a handle, whose parts lie in a folder beside a checkpoint."""

    def __init__(self, ddp: Mapping[str, Any] | None, fields: Mapping[str, Any]) -> None:
        _refuse_options(type(self).__name__, ddp or {}, fields)
        super().__init__(**(ddp or {}))
        self._module: weakref.ref[LightningModule] | None = None
        self._file: Path | None = None
        self._steps: int | None = None

    @property
    def _handle(self) -> Attached | LocalSteps | None:
        """The handle that is saved; None before the first `fit`."""
        raise NotImplementedError

    def _is_same_model(self) -> bool:
        """Return True in a second `fit` of the same model, and note the model."""
        assert self.lightning_module is not None
        is_same = self._module is not None and self._module() is self.lightning_module
        self._module = weakref.ref(self.lightning_module)
        return is_same

    def _resume(self, handle: Attached | LocalSteps, file: Path) -> None:
        if self._steps is None:
            log.warning("%s was written without gradwire: residuals start at zero", file)
            return
        folder = _folder(file)
        if not (folder / MANIFEST).is_file():
            raise StateError(
                f"{file} was written with gradwire, but {folder} is not there: copy this folder "
                f"with the file"
            )
        load(handle, folder)
        if handle.steps != self._steps:
            raise StateError(
                f"{file} is of step {self._steps} and {folder} of step {handle.steps}: one of "
                f"them was written later; take the last checkpoint that is whole"
            )

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        # ModelCheckpoint(save_last="link") links to the file only, not to the folder beside it.
        self._file = Path(os.path.realpath(checkpoint_path))
        self._steps = checkpoint[_KEY]["steps"] if _KEY in checkpoint else None
        return checkpoint

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        # Nothing can resume from a checkpoint without an optimiser, so it gets no residuals.
        if self._handle is not None and "optimizer_states" in checkpoint:
            checkpoint[_KEY] = {"steps": self._handle.steps}
            save(self._handle, _folder(filepath))
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        super().remove_checkpoint(filepath)
        if self.local_rank == 0:
            shutil.rmtree(_folder(filepath), ignore_errors=True)

    def teardown(self) -> None:
        # The handle stays, because users call `save_checkpoint` and `stats()` after `fit`.
        if self._handle is not None:
            self._handle.close()
        super().teardown()


class GradwireStrategy(_WithParts):
    """Lightning's DDP strategy with a compressed gradient exchange, on GPUs and on CPUs.

        trainer = Trainer(strategy=GradwireStrategy(method="topk", density=0.001), devices=4)

    The fields are those of `gradwire.attach`. `ddp` holds options of Lightning's DDPStrategy, for
    instance ddp={"find_unused_parameters": True}. `trainer.strategy.wire` is the wire, from the
    start of `fit` on.

    Beside every checkpoint FILE that can be resumed from, the ranks write FILE.gradwire, a folder
    of `gradwire.save`. `fit(ckpt_path=FILE)` reads the folder, on any number of ranks. A second
    `fit` of the same model goes on with the residuals of the first.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        ddp: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(ddp, fields)
        check_fields(config, fields)
        self._config, self._fields = config, fields
        self.wire: Attached | None = None

    @property
    def _handle(self) -> Attached | None:
        return self.wire

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self.wire is not None:
            try:
                refuse_for_recipe(self._fields, self.optimizers)
            except AttachError:
                # Lightning makes the optimisers after it has wrapped the model.
                self.wire.close()
                raise
            warn_of_adam(self.wire, self.optimizers)
        # A checkpoint that was loaded for a test must not reach into the next fit.
        self._file = self._steps = None

    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert self.model is not None
        last_wire, is_same = self.wire, self._is_same_model()
        scaler = getattr(self.precision_plugin, "scaler", None)
        self.wire = attach(self.model, self._config, scaler=scaler, **self._fields)
        if self._file is not None:
            self._resume(self.wire, self._file)
        elif last_wire is not None and is_same:
            self.wire.load_state_dict(last_wire.state_dict())


class LocalStepsStrategy(_WithParts):
    """Lightning's DDP strategy without its averaging: ranks train on their own, in rounds.

        trainer = Trainer(strategy=LocalStepsStrategy(recipe="muon"), devices=4)

    The arguments are those of `gradwire.local_steps`; `ddp` holds options of Lightning's
    DDPStrategy. The module's `configure_optimizers` returns one optimiser: with a recipe
    `gradwire.optim.muon(self, lr=...)`. `trainer.strategy.local` is the handle, from the start of
    `fit` on.

    Validation and checkpoints see the weights that all ranks share. At the end of `fit` the model
    has them. Beside every checkpoint FILE that can be resumed from lies FILE.gradwire, with every
    rank's own weights and optimiser. A second `fit` begins anew, from the shared weights.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        ddp: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(ddp, arguments)
        read_arguments(config, arguments)
        self._config, self._arguments = config, arguments
        self.local: LocalSteps | None = None
        self._is_training = False
        self._shared = ExitStack()

    @property
    def _handle(self) -> LocalSteps | None:
        return self.local

    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert self.model is not None
        leave_alone(self.model)

    def setup(self, trainer: Trainer) -> None:
        is_fit = trainer.state.fn == TrainerFn.FITTING
        file = self._file if is_fit else None
        super().setup(trainer)
        # A checkpoint that was loaded for a test must not reach into the next fit.
        self._file = file
        if is_fit:
            if len(self.optimizers) != 1:
                raise AttachError(
                    f"LocalStepsStrategy counts the steps of one optimiser, configure_optimizers "
                    f"returned {len(self.optimizers)}: return one, such as "
                    f"gradwire.optim.muon(self, lr=0.004)"
                )
            assert self.lightning_module is not None
            self.local = local_steps(
                self.lightning_module, self.optimizers[0], config=self._config, **self._arguments
            )

    def on_train_start(self) -> None:
        """Load this rank's part, after Lightning gave all ranks the same weights and moments."""
        super().on_train_start()
        assert self.local is not None
        if self._file is not None:
            self._resume(self.local, self._file)
        self._file = self._steps = None
        self._is_training = True

    def optimizer_step(
        self,
        optimizer: Any,
        closure: Callable[[], Any],
        model: Any = None,
        **options: Any,
    ) -> Any:
        """Take a step of the optimiser, and count it as an inner step."""
        output = super().optimizer_step(optimizer, closure, model, **options)
        assert self.local is not None
        self.local.step()
        return output

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights that all ranks share, and this rank's buffers."""
        state = super().lightning_module_state_dict()
        if not self._is_training or self.local is None or self.local.is_shared:
            return state
        with self.local.shared():
            # Clones, because the rank's own weights come back into these tensors.
            return {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in super().lightning_module_state_dict().items()
            }

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        # ModelCheckpoint saves before validation has ended, and a part holds the own weights.
        is_shared = self.local is not None and self.local.is_shared
        if is_shared:
            checkpoint["state_dict"] = copy.deepcopy(checkpoint["state_dict"])
            self._shared.close()
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if is_shared:
            self.on_validation_start()

    def on_validation_start(self) -> None:
        """Put the shared weights into the model during a fit."""
        if self._is_training and self.local is not None:
            self._shared.enter_context(self.local.shared())

    def on_validation_end(self) -> None:
        """Put the rank's own weights back."""
        self._shared.close()

    def on_exception(self, exception: BaseException) -> None:
        """Put the rank's own weights back, so that they can be saved."""
        super().on_exception(exception)
        self._shared.close()

    def on_train_end(self) -> None:
        """Exchange what the last round has done, and leave the shared weights in the model."""
        super().on_train_end()
        assert self.local is not None
        self._is_training = False
        end_alone(self.local)


def _refuse_options(strategy: str, ddp: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    if not isinstance(ddp, Mapping):
        raise ConfigError(
            f"ddp must be a dict of options of DDPStrategy, got {type(ddp).__name__}: e.g. "
            f"ddp={{'find_unused_parameters': True}}"
        )
    if hooks := [name for name in _HOOKS if name in ddp]:
        raise ConfigError(
            f"ddp[{hooks[0]!r}]: DDP takes one hook, which is gradwire's; leave it out"
        )
    # `timeout` is a field of Config too.
    ddp_options = {
        name
        for owner in (DDPStrategy, DistributedDataParallel)
        for name in inspect.signature(owner).parameters
    } - {"timeout"}
    if wrong := [name for name in fields if name in ddp_options]:
        raise ConfigError(
            f"{wrong[0]} is an option of DDPStrategy: {strategy}(..., "
            f"ddp={{{wrong[0]!r}: {fields[wrong[0]]!r}}})"
        )


def _folder(file: str | os.PathLike[str]) -> Path:
    """Return the folder of residuals beside a checkpoint; raise StateError for a remote file."""
    path = os.fspath(file)
    if "://" in path:
        raise StateError(
            f"{path}: every rank writes its part beside the checkpoint, which needs a local or "
            f"mounted folder; give ModelCheckpoint such a dirpath"
        )
    return Path(f"{path}.gradwire")
