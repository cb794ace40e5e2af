"""The command `gradwire report`."""

from pathlib import Path
from typing import Annotated

import typer

from gradwire.workbench.cli.say import say
from gradwire.workbench.report import headline, read_runs, write_report


def report(
    folder: Annotated[
        Path, typer.Argument(help="A folder that `gradwire train` or `gradwire study` made.")
    ],
) -> None:
    """Write report.html of a folder again: that of a run, even while it goes, or of studies."""
    from gradwire.workbench.report.studies import write_studies
    from gradwire.workbench.study.folder import studies_in

    if studies_in(folder):
        say(f"report  {write_studies(folder)}")
        return
    path = write_report(folder)
    say(headline(read_runs(folder)))
    say(f"report  {path}")
