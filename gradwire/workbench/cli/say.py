"""Print lines, errors and warnings on the terminal."""

from rich.console import Console
from rich.text import Text

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


def say(text: str = "", style: str = "") -> None:
    """Print a line without changes: brackets are no markup, and long lines are not broken."""
    console.print(Text(text, style=style), soft_wrap=True)


def complain(text: str) -> None:
    """Print `error: ...` in red on stderr."""
    errors.print(Text(f"error: {text}", style="red"), soft_wrap=True)


def warn(text: str) -> None:
    """Print `warning: ...` in yellow on stderr."""
    errors.print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)
