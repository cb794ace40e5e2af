"""The command `gradwire train`."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gradwire.errors import ConfigError
from gradwire.workbench.cli.flags import chosen_fields, long_name, with_flags
from gradwire.workbench.cli.outcome import train_and_report
from gradwire.workbench.cli.say import complain
from gradwire.workbench.train import Options, RunLimits, TrainJob, program
from gradwire.workbench.train.flag import FOLDER
from gradwire.workbench.train.saved import FREE

EXAMPLES = """Examples:

  gradwire train --model lenet5 --density 0.01 --workers 4 --compare dense

  gradwire train --model resnet20 --data-dir ~/data --method topk --density 0.001 --lr-drop 80,120

  gradwire train --model resnet20 --data-dir ~/data --recipe plain-union --cosine --compare dense

  gradwire train --model gpt-tiny --recipe muon --workers 4 --compare dense-muon

  torchrun --nproc-per-node=8 -m gradwire train --model resnet20 --data-dir ~/data --out runs/a

  gradwire train --resume runs/a
"""


_Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        rich_help_panel=FOLDER,
        help="The run folder. Default: runs/, then model, method, density and time.",
    ),
]
_Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite", rich_help_panel=FOLDER, help="Replace the run in --out, if there is one."
    ),
]
_Resume = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        rich_help_panel=FOLDER,
        help="Go on with the run in this folder. Other flags must be those of the run, except "
        f"{', '.join(map(long_name, FREE))}.",
    ),
]


@with_flags(Options, RunLimits)
def train_command(
    *, out: _Out = None, overwrite: _Overwrite = False, resume: _Resume = None, **flags: Any
) -> None:
    """Train a model on P workers with compressed gradients, and write a report.

    Alone it starts its own workers. Under torchrun it uses the ranks of torchrun. On CUDA it uses
    NCCL. Ctrl-C, SIGTERM or SIGHUP saves a checkpoint, shows the command that continues the run
    bit for bit, and exits with code 130.
    """
    choices, limits = chosen_fields(Options, flags), RunLimits(**chosen_fields(RunLimits, flags))
    command = f"{program()} {shlex.join(sys.argv[1:])}"
    try:
        code = train_and_report(
            _make_job(choices, out, overwrite, resume, limits=limits, command=command)
        )
    except KeyboardInterrupt:
        complain("stopped at once; the last checkpoint is what remains.")
        code = 130
    if code:
        raise typer.Exit(code)


def _make_job(
    choices: dict[str, Any], out: Path | None, overwrite: bool, resume: Path | None, **fields: Any
) -> TrainJob:
    """Return the job that the flags describe."""
    if resume is None:
        return TrainJob.new(choices, out, overwrite=overwrite, **fields)
    if out is not None or overwrite:
        raise ConfigError("--resume goes on in its own folder: leave --out and --overwrite out.")
    return TrainJob.resume(resume, choices, **fields)
