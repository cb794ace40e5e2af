"""The `gradwire` command."""

import os
import signal
import sys
from types import FrameType

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
        # A command has a handler of its own once it has begun.
        _stop()


def _stop(number: int = signal.SIGINT, frame: FrameType | None = None) -> None:
    """End at Ctrl-C in one line, before a command has begun."""
    print("stopped before the beginning.", file=sys.stderr, flush=True)
    os._exit(130)


def _run() -> None:
    try:
        # The imports take seconds. torch takes a KeyboardInterrupt that reaches it while it
        # imports numpy for a missing numpy, so the handler raises none.
        before = signal.signal(signal.SIGINT, _stop)
        from gradwire.workbench.cli.app import app

        signal.signal(signal.SIGINT, before)
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
