"""The command `gradwire study`."""

import shlex
import sys
from pathlib import Path

import typer

from gradwire.errors import unknown
from gradwire.workbench.cli.say import complain, console, say


def study(
    name: str = typer.Argument(help="The study; `gradwire study list` shows them."),
    out: Path = typer.Option(Path("studies"), "--out", "-o", help="Folder of all studies."),
    small: bool = typer.Option(
        False, "--small", help="Run on a CPU in two minutes, with embedded data."
    ),
    data_dir: Path | None = typer.Option(None, "--data-dir", help="Folder of the data sets."),
    device: str = typer.Option("auto", help="cpu, cuda, or auto."),
    seed: int = typer.Option(0, "--seed", "-s", min=0, help="The seed of everything random."),
    seeds: int = typer.Option(
        0, min=0, help="Number of seeds, from --seed on (accuracy, convergence, language)."
    ),
    epochs: int = typer.Option(
        0, min=0, help="Epochs in place of the study's own (accuracy, convergence)."
    ),
    model: str = typer.Option("", help="Language: gpt-tiny to gpt-124m. Lists take commas."),
    extend: bool = typer.Option(
        False,
        "--extend",
        help="Language: add learning rates, by factors of 2, until the best has a worse one on "
        "both sides; then the other seeds at the best.",
    ),
    vocabulary: str = typer.Option(
        "", help="Language: tokens of a byte-pair encoding of the text; 0 for bytes."
    ),
    width: str = typer.Option("", help="Language: entries of a token."),
    depth: str = typer.Option("", help="Language: decoder blocks."),
    workers: str = typer.Option("", help="Language: virtual workers."),
    tokens: str = typer.Option("", help="Language: tokens per step, of all workers together."),
    steps: str = typer.Option("", help="Language: steps of a run."),
    recipe: str = typer.Option("", help="Language: the ways to train."),
    every: str = typer.Option("", help="Language: steps per round."),
    lr: str = typer.Option("", help="Language: the largest learning rate."),
    exchange: str = typer.Option("", help="Language: allgather or owner, in place of a recipe's."),
    values: str = typer.Option("", help="Language: how entries travel, e.g. sign or two-bit."),
    back: str = typer.Option("", help="Language: how owners send means back, e.g. int4."),
    density: str = typer.Option("", help="Language: the share of entries that is sent."),
    outer_lr: str = typer.Option("", help="Language: the outer learning rate."),
    outer_momentum: str = typer.Option("", help="Language: the outer momentum."),
    decay: str = typer.Option("", help="Language: the factor on the residual per round."),
    only: list[str] = typer.Option(
        [], "--only", help="Measure only cells with this text: `--only fnn3,lenet5 --only topk`."
    ),
    jobs: int = typer.Option(1, "--jobs", "-j", min=1, help="Cells measured side by side."),
) -> None:
    """Measure a figure or table of the papers again: rows, pictures, and a page of the report.

    The same command continues a study that was stopped. Several processes can share one OUT, each
    with another --only. `gradwire report OUT` collects their results.
    """
    from gradwire.workbench.report.studies import write_studies
    from gradwire.workbench.study import STUDIES, Settings
    from gradwire.workbench.study.run import run_study
    from gradwire.workbench.train.options import pick_device

    if name == "list":
        for entry in STUDIES.values():
            console.print(f"  [cyan]{entry.name:<14}[/cyan] {entry.title} ({entry.figures})")
        return
    if name not in STUDIES:
        raise unknown("study", name, STUDIES)
    kind = "cpu" if small and device == "auto" else pick_device(device)
    files = str(data_dir.expanduser().absolute()) if data_dir else None
    given = {"model": model, "width": width, "depth": depth, "workers": workers, "tokens": tokens}
    given |= {"steps": steps, "recipe": recipe, "every": every, "lr": lr}
    given |= {"vocabulary": vocabulary, "exchange": exchange, "values": values, "back": back}
    given |= {"density": density, "decay": decay}
    given |= {"outer_lr": outer_lr, "outer_momentum": outer_momentum}
    chosen = {name: text for name, text in given.items() if text}
    settings = Settings(small, files, kind, seed, seeds, epochs, chosen=chosen, extend=extend)
    command = f"gradwire {shlex.join(sys.argv[1:])}"
    try:
        page = run_study(STUDIES[name], settings, out, command, say, only, jobs)
    except KeyboardInterrupt:
        complain("stopped; what is measured is kept, the same command goes on.")
        raise typer.Exit(130) from None
    say(page.summary)
    say(f"report  {write_studies(out)}")
