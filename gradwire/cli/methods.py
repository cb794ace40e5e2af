"""`gradwire methods`."""

from rich.table import Table

from gradwire.cli.say import console
from gradwire.compress import METHODS
from gradwire.exchange import EXCHANGES


def methods() -> None:
    """List the methods (how a worker chooses) and the exchanges (how workers agree).

    Written together they are a name for --method and --compare: topk/allgather. Options, with their
    defaults, go to --option NAME=VALUE and to gradwire.attach(..., NAME=VALUE).
    """
    for title, entries in (("Methods", METHODS), ("Exchanges", EXCHANGES)):
        table = Table(title=title, title_justify="left", title_style="bold", box=None)
        table.show_header = False
        table.add_column(style="cyan", no_wrap=True)
        table.add_column()
        for name, entry in entries.items():
            options = ", ".join(f"{option}={value}" for option, value in entry.options.items())
            table.add_row(f"  {name}", f"{entry.summary} [dim]{options}[/dim]".rstrip())
        console.print(table)
