"""`gradwire report`."""

from pathlib import Path
from typing import Annotated

import typer

from gradwire.cli.say import say
from gradwire.report import headline, read_runs, write_report


def report(
    folder: Annotated[Path, typer.Argument(help="A run folder, as `gradwire train` makes it.")],
) -> None:
    """Write a run folder's report.html again, also while the run is still going."""
    path = write_report(folder)
    say(headline(read_runs(folder)))
    say(f"report  {path}")
