"""The command-line application: one command per file."""

from importlib import import_module
from importlib.util import find_spec

import typer

from gradwire.version import __version__
from gradwire.workbench.cli.doctor import doctor
from gradwire.workbench.cli.flags import set_classes
from gradwire.workbench.cli.lab import lab_app
from gradwire.workbench.cli.methods import methods
from gradwire.workbench.cli.plan import plan_command
from gradwire.workbench.cli.report import report
from gradwire.workbench.cli.study import study
from gradwire.workbench.cli.train import EXAMPLES, train_command

app = typer.Typer(
    name="gradwire",
    help="Train PyTorch models over slow networks: send the gradient entries that matter, "
    "keep the rest for later, lose nothing.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Show the version.")) -> None:
    """Show the version for --version."""
    if version:
        typer.echo(f"gradwire {__version__}")
        raise typer.Exit


app.command("train", epilog=EXAMPLES)(train_command)
app.command()(methods)
app.command("plan")(plan_command)
app.command()(study)
app.command()(report)
app.command()(doctor)
app.add_typer(lab_app, name="lab")

if find_spec("gradwire.workbench.cli.bench"):
    app.add_typer(import_module("gradwire.workbench.cli.bench").bench_app, name="bench")
set_classes(app)
