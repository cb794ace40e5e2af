"""The `gradwire` command."""

import sys

from gradwire.errors import GradwireError
from gradwire.version import __version__

NEEDED = ("typer", "rich")


def main() -> None:
    """Runs the command line; a user's mistake is one line and exit code 2, never a traceback."""
    if sys.argv[1:] == ["--version"]:
        # Here, because the commands import torch, which takes seconds.
        print(f"gradwire {__version__}")
        raise SystemExit(0)
    try:
        from gradwire.workbench.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        sys.exit(f"error: the command line needs {error.name}: pip install 'gradwire[cli]'")
    try:
        app()
    except GradwireError as error:
        from gradwire.workbench.cli.say import complain

        complain(str(error))
        sys.exit(2)
