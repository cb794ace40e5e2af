"""What a command means: which runs in which folder."""

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
    """What to do in which folder, and what to say before it starts.

    `command` is what was typed, a line a time; the report shows it.
    """

    folder: Path
    options: Options
    limits: RunLimits = field(default_factory=RunLimits)
    resumed: bool = False
    overwrite: bool = False
    notes: tuple[str, ...] = ()
    command: str = ""

    @classmethod
    def new(cls, choices: Mapping[str, Any], out: Path | None = None, **rest: Any) -> "TrainJob":
        """A new run. `given` are the options that were chosen; None is not chosen."""
        options = resolve(choices, _torchrun_workers())
        return cls(out or default_folder(options), options, **rest)

    @classmethod
    def resume(
        cls, folder: Path, choices: Mapping[str, Any], command: str = "", **rest: Any
    ) -> "TrainJob":
        """The run in `folder`, from its last checkpoint on."""
        workers = _torchrun_workers()
        asked = dict(choices) | ({"workers": workers} if workers else {})
        options, notes = resume_options(folders.read_config(folder), asked)
        pick_device(options.device)
        commands = "\n".join(filter(None, [folders.read_command(folder), command]))
        return cls(folder, options, resumed=True, notes=tuple(notes), command=commands, **rest)

    def runs(self) -> list[tuple[Options, Path]]:
        """The run itself, then those it is compared with, each with its folder."""
        own = dataclasses.replace(self.options, compare=())
        others = [
            (self.options.with_method(name), folders.compare_folder(self.folder, name))
            for name in self.options.compare
        ]
        return [(own, self.folder), *others]


def default_folder(options: Options) -> Path:
    """A new folder's name: runs/, the model, the method and the time."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{options.model}-{options.method}-{options.density:g}-{stamp}"


def resume_command(folder: Path) -> str:
    """What to type to go on with the run in `folder`."""
    return f"{program()} train --resume {shlex.quote(str(folder))}"


def program() -> str:
    """How this program was started."""
    if not under_torchrun():
        return "gradwire"
    ranks = os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    return f"torchrun --nproc-per-node={ranks} -m gradwire"


def _torchrun_workers() -> int | None:
    """How many ranks torchrun started, if it did."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else None
