"""GradwireStrategy for Lightning: one argument of the Trainer.

It is a strategy, because Lightning ignores communication hooks on a CPU. Lightning also tells a
strategy the path of every checkpoint on every rank, and does not tell a callback.
"""

import inspect
import logging
import os
import shutil
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from gradwire.config import Config
from gradwire.errors import AttachError, ConfigError, StateError
from gradwire.integrate.adam import refuse_for_recipe, warn_of_adam
from gradwire.integrate.attached import Attached
from gradwire.integrate.ddp import attach, check_fields
from gradwire.integrate.versions import require
from gradwire.state.saved.folder import MANIFEST, load, save

require("lightning")

from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402

log = logging.getLogger("gradwire")
_KEY = "gradwire"
"""The entry of a checkpoint that says that residuals lie beside it."""
_HOOKS = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")
"""Options of DDPStrategy that would set DDP's only hook."""


class GradwireStrategy(DDPStrategy):
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
        _refuse_options(ddp or {}, fields)
        check_fields(config, fields)
        self._config, self._fields = config, fields
        super().__init__(**(ddp or {}))
        self.wire: Attached | None = None
        self._module: weakref.ref[LightningModule] | None = None
        self._file: Path | None = None
        self._steps: int | None = None

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
        assert self.lightning_module is not None
        last_wire = self.wire
        is_same_model = self._module is not None and self._module() is self.lightning_module
        scaler = getattr(self.precision_plugin, "scaler", None)
        self.wire = attach(self.model, self._config, scaler=scaler, **self._fields)
        self._module = weakref.ref(self.lightning_module)
        if self._file is not None:
            self._resume(self.wire, self._file)
        elif last_wire is not None and is_same_model:
            self.wire.load_state_dict(last_wire.state_dict())

    def _resume(self, wire: Attached, file: Path) -> None:
        if self._steps is None:
            log.warning("%s was written without gradwire: residuals start at zero", file)
            return
        folder = _folder(file)
        if not (folder / MANIFEST).is_file():
            raise StateError(
                f"{file} was written with gradwire, but {folder} is not there: copy this folder "
                f"with the file"
            )
        load(wire, folder)
        if wire.steps != self._steps:
            raise StateError(
                f"{file} is of step {self._steps} and {folder} of step {wire.steps}: one of them "
                f"was written later; take the last checkpoint that is whole"
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
        if self.wire is not None and "optimizer_states" in checkpoint:
            checkpoint[_KEY] = {"steps": self.wire.steps}
            save(self.wire, _folder(filepath))
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        super().remove_checkpoint(filepath)
        if self.local_rank == 0:
            shutil.rmtree(_folder(filepath), ignore_errors=True)

    def teardown(self) -> None:
        # The wire stays, because users call `save_checkpoint` and `wire.stats()` after `fit`.
        if self.wire is not None:
            self.wire.close()
        super().teardown()


def _refuse_options(ddp: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
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
            f"{wrong[0]} is an option of DDPStrategy: GradwireStrategy(..., "
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
