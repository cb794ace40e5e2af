"""The commands `gradwire lab ...`."""

import signal
from types import FrameType
from typing import Annotated

import typer

from gradwire.workbench.cli.say import complain, say

lab_app = typer.Typer(
    help="A cluster on this Linux machine: one network per rank, with links as slow as you choose.",
    no_args_is_help=True,
)
INTERRUPTED = 130


@lab_app.callback()
def lab() -> None:
    """A cluster on this Linux machine: one network per rank, with links as slow as you choose."""


# Flags after COMMAND belong to COMMAND, with or without `--` before it.
@lab_app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="A script as for torchrun.")
    ],
    ranks: Annotated[int, typer.Option(help="Ranks, each with a network of its own.")] = 4,
    link: Annotated[
        str, typer.Option(help="Each way of each rank's link: 100mbit, 1gbit, 10gbit.")
    ] = "1gbit",
    latency: Annotated[str, typer.Option(help="From rank to rank, one way: 5ms, 200us.")] = "0ms",
    islands: Annotated[
        str, typer.Option(help="2x2: islands of ranks with fast links inside, in place of --ranks.")
    ] = "",
) -> None:
    """Run COMMAND on every rank: gradwire lab run --link 100mbit -- python script.py.

    Needs root and pyroute2. The links are measured first. Every rank has the environment of
    torchrun (RANK, WORLD_SIZE, MASTER_ADDR, ...). When a rank fails, the others are stopped, and
    its exit code is returned. The cluster is removed at the end.
    """
    from gradwire.workbench.lab.islands import parse_islands
    from gradwire.workbench.lab.lab import Lab, check_memory
    from gradwire.workbench.lab.processes import check_command, run_ranks

    count, inside = parse_islands(islands)
    ranks = count * inside or ranks
    cluster = Lab(ranks, link, latency, count)
    check_memory(ranks)
    check_command(command)
    leave_on_signals()
    try:
        with cluster:
            say(cluster.describe())
            code = run_ranks(cluster, command)
    except KeyboardInterrupt:
        complain("stopped; the lab is removed.")
        code = INTERRUPTED
    if code:
        raise typer.Exit(code)


def leave_on_signals() -> None:
    """Make SIGTERM and SIGHUP end the process by way of every `finally`."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)


def _leave(number: int, _: FrameType | None) -> None:
    """Leave by way of every `finally`."""
    raise SystemExit(128 + number)
