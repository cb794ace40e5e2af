"""The command `gradwire methods`."""

from rich.table import Table

from gradwire.compress import METHODS
from gradwire.exchange import EXCHANGES
from gradwire.recipes import LOCAL_RECIPES, RECIPES
from gradwire.workbench.cli.say import console


def methods() -> None:
    """List the methods (how a worker chooses), the exchanges (how workers agree) and the recipes.

    --method and --compare take a method, or a method with an exchange: topk/allgather. The options,
    shown with their defaults, go to --options NAME=VALUE and to gradwire.attach(..., NAME=VALUE).
    A recipe, for --recipe and recipe=..., stands for the fields shown with it. The last ones are
    for gradwire.local_steps(..., recipe=...).
    """
    for title, rows in (
        ("Methods", [(name, m.summary, m.options) for name, m in METHODS.items()]),
        ("Exchanges", [(name, e.summary, e.options) for name, e in EXCHANGES.items()]),
        ("Recipes", [(name, r.summary, r.fields) for name, r in RECIPES.items()]),
        (
            "Recipes of gradwire.local_steps",
            [(name, r.summary, r.fields) for name, r in LOCAL_RECIPES.items()],
        ),
    ):
        table = Table(title=title, title_justify="left", title_style="bold", box=None)
        table.show_header = False
        table.add_column(style="cyan", no_wrap=True)
        table.add_column()
        for name, summary, values in rows:
            shown = ", ".join(f"{key}={value}" for key, value in values.items())
            table.add_row(f"  {name}", f"{summary} [dim]{shown}[/dim]".rstrip())
        console.print(table)
