"""The `gradwire` command."""

import sys

from gradwire.errors import GradwireError
from gradwire.version import __version__

_NEEDED = ("typer", "rich")


def main() -> None:
    """Run the command line. A user's mistake is an error of one line, with exit code 2."""
    if sys.argv[1:] == ["--version"]:
        # Answered here, because the commands import torch, which takes seconds.
        print(f"gradwire {__version__}")
        raise SystemExit(0)
    try:
        _run()
    except KeyboardInterrupt:
        # Before a command has begun: the imports take seconds.
        print("stopped before the beginning.", file=sys.stderr)
        sys.exit(130)


def _run() -> None:
    try:
        from gradwire.workbench.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        sys.exit(f"error: the command line needs {error.name}: pip install 'gradwire[cli]'")
    try:
        app()
    except GradwireError as error:
        from gradwire.workbench.cli.say import complain

        complain(str(error))
        sys.exit(2)
