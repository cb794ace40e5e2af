"""A training job: the runs that a command asks for, and their folders."""

import dataclasses
import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradwire.workbench.train import folder as folders
from gradwire.workbench.train.options import Options, pick_device, resolve
from gradwire.workbench.train.saved import resume_options
from gradwire.workbench.train.trainer import RunLimits
from gradwire.workbench.train.worker import under_torchrun


@dataclass(frozen=True)
class TrainJob:
    """The runs of one command, in one folder.

    options: those of the main run. limits: how far it goes this time. resumed: True: the folder
    already holds the run. overwrite: True: remove a run that is already in the folder.
    notes: sentences for the user, shown before the start.
    command: the command lines of the run so far, one per line. The report shows them.
    """

    folder: Path
    options: Options
    limits: RunLimits = field(default_factory=RunLimits)
    resumed: bool = False
    overwrite: bool = False
    notes: tuple[str, ...] = ()
    command: str = ""

    @classmethod
    def new(cls, choices: Mapping[str, Any], out: Path | None = None, **fields: Any) -> "TrainJob":
        """Return the job of a new run. `choices`: the options of the user; None is no choice."""
        options = resolve(choices, _torchrun_workers())
        return cls(out or _default_folder(options), options, **fields)

    @classmethod
    def resume(
        cls, folder: Path, choices: Mapping[str, Any], command: str = "", **fields: Any
    ) -> "TrainJob":
        """Return the job that goes on with the run in `folder`, from its last checkpoint."""
        workers = _torchrun_workers()
        choices = dict(choices) | ({"workers": workers} if workers else {})
        options, notes = resume_options(folders.read_config(folder), choices)
        pick_device(options.device)
        commands = "\n".join(filter(None, [folders.read_command(folder), command]))
        return cls(folder, options, resumed=True, notes=tuple(notes), command=commands, **fields)

    def runs(self) -> list[tuple[Options, Path]]:
        """Return the main run and then the runs of --compare, each with its folder."""
        main = dataclasses.replace(self.options, compare=())
        others = [
            (self.options.with_method(name), folders.compare_folder(self.folder, name))
            for name in self.options.compare
        ]
        return [(main, self.folder), *others]


def _default_folder(options: Options) -> Path:
    """Return a new folder in runs/, named by model, method, density and time."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{options.model}-{options.method}-{options.density:g}-{stamp}"


def resume_command(folder: Path) -> str:
    """Return the command that goes on with the run in `folder`."""
    return f"{program()} train --resume {shlex.quote(str(folder))}"


def program() -> str:
    """Return the beginning of the command line that started this program."""
    if not under_torchrun():
        return "gradwire"
    ranks = os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    return f"torchrun --nproc-per-node={ranks} -m gradwire"


def _torchrun_workers() -> int | None:
    """Return the number of ranks that torchrun started; None without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else None
