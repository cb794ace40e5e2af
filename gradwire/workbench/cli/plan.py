"""The command `gradwire plan`."""

import functools
import importlib
import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from gradwire.errors import ConfigError, one_line
from gradwire.workbench.cli.say import console, say

_NEAR = 0.15
"""The relative error of a prediction that still counts as near."""


def plan_command(
    model: str = typer.Option(
        "",
        help="resnet50, gpt2, 7B, ... (`gradwire plan --models`), my.module:build (a function that "
        "returns an nn.Module), or a .pt of shapes.",
    ),
    models: bool = typer.Option(False, "--models", help="List the names of models, and end."),
    params: str = typer.Option(
        "", help="In place of a model: the number of parameters, such as 70B."
    ),
    step_seconds: float | None = typer.Option(
        None,
        help="Seconds of one worker's step without exchange; guessed from FLOP for a named model.",
    ),
    batch: int | None = typer.Option(None, help="Examples per worker. Default: the recipe's."),
    workers: int | None = typer.Option(None, help="Workers, one GPU each."),
    nodes: int | None = typer.Option(None, help="Nodes, one link each. Default: one per worker."),
    gpus_per_node: int | None = typer.Option(
        None, help="Workers of a node, in place of --workers: --nodes 2 --gpus-per-node 8."
    ),
    link: str = typer.Option("10gbit", help="A node's link: 100mbit, 10Gbps, 25 Gbit/s."),
    latency: str = typer.Option("50us", help="Latency of a link, one way: 50us, 5ms."),
    inner_link: str = typer.Option(
        "200gbit",
        "--inner-link",
        "--local-link",
        help="The link of each GPU inside its node: nvlink4, pcie4, 200gbit.",
    ),
    gpu: str = typer.Option("", help="v100, a100, h100, ..., cpu. Default: measured here."),
    optimizer: str = typer.Option(
        "", help="sgd, adamw or muon. Default: the usual one of such a network."
    ),
    recipe: str = typer.Option(
        "", help="Only this recipe may be recommended: plain-union, muon, muon-wan, ..."
    ),
    density: str = typer.Option("", help="Only these densities, with commas."),
    min_density: float = typer.Option(0.001, help="The least density that may be recommended."),
    methods: str = typer.Option("", help="Only these, with commas: topk, topk/union."),
    bundle_mb: float | None = typer.Option(None, help="Only bundles of this size."),
    measure: bool = typer.Option(
        False, "--measure", help="Measure link and latency between the ranks of torchrun."
    ),
    everything: bool = typer.Option(
        False, "--all", help="Show every prediction, not one per method."
    ),
    check: str = typer.Option(
        "",
        help="Show predictions beside measurements: `paper`, or a .jsonl of `bench step --json`.",
    ),
    html: Path | None = typer.Option(None, help="Write a page with bars and curves."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Predict the seconds of a step for every way to exchange gradients, and recommend one.

    Beside gradwire's ways stand PyTorch's: DDP, its bf16 and PowerSGD hooks, and FSDP. The
    recommendation may be not to compress. Times are predicted; what a way does to the accuracy is
    said where it was measured.
    """
    from gradwire.plan.ask import plan as make_plan
    from gradwire.workbench.report.plan_page import check_html_name, write_plan_page
    from gradwire.workbench.report.plan_text import WIDTH, left_out, plan_table

    if models:
        _list_models()
        return
    if check:
        _check(check, as_json)
        return
    if html is not None:
        check_html_name(html)
    links: dict[str, str | float] = {"link": link, "latency": latency}
    if measure:
        cluster = _measure()
        if cluster is None:
            return
        workers, nodes = cluster["ranks"], cluster["nodes"]
        links = {"link": cluster["link"], "latency": cluster["latency"]}
    workers, nodes = _count_workers(workers, nodes, gpus_per_node)
    result = make_plan(
        _imported(model) if ":" in model else model,
        workers=workers,
        nodes=nodes,
        inner_link=inner_link,
        gpu=gpu,
        optimizer=optimizer,
        recipe=recipe,
        params=_count(params),
        step_seconds=step_seconds,
        batch=batch,
        methods=[m.strip() for m in methods.split(",") if m.strip()],
        density=_numbers(density),
        min_density=min_density,
        bundle_mb=bundle_mb,
        **links,
    )
    if as_json:
        typer.echo(json.dumps(result.asdict()))
    else:
        # Wide enough for the table: a narrow terminal wraps lines, rich would cut numbers off.
        Console(width=max(WIDTH, console.width)).print(plan_table(result, everything))
        say(result.recommendation.reason, style="bold")
        for line in result.recommendation.code:
            say(f"    {line}")
        for note in filter(None, [*result.notes, left_out(result, everything)]):
            say(f"note: {note}.")
    if html is not None:
        path = write_plan_page(result, html)
        if not as_json:
            say(f"page  {path}")


def _list_models() -> None:
    """Print the names of models, with their parameters."""
    from gradwire.plan.language import language_sizes
    from gradwire.plan.show import show_count
    from gradwire.workbench.models import MODELS

    sizes = {name: spec.parameters for name, spec in MODELS.items()} | language_sizes()
    for name, count in sizes.items():
        say(f"{name:14} {show_count(count)} parameters")


def _count_workers(
    workers: int | None, nodes: int | None, gpus_per_node: int | None
) -> tuple[int, int | None]:
    """Return workers and nodes from two of the three numbers."""
    if gpus_per_node is None:
        if workers is None:
            raise ConfigError("workers must be given: --workers 16, or --measure under torchrun")
        return workers, nodes
    if gpus_per_node < 1:
        raise ConfigError(f"gpus_per_node must be at least 1, got {gpus_per_node}")
    if nodes is None:
        if workers is None or workers % gpus_per_node:
            raise ConfigError(
                f"--gpus-per-node {gpus_per_node} needs --nodes, or --workers that it divides"
            )
        nodes = workers // gpus_per_node
    if workers not in (None, nodes * gpus_per_node):
        raise ConfigError(
            f"{nodes} nodes of {gpus_per_node} GPUs are {nodes * gpus_per_node} workers, not "
            f"{workers}: leave out --workers"
        )
    return nodes * gpus_per_node, nodes


def _imported(name: str) -> Any:
    """Return the module that `package.file:function` builds, on the meta device if it can."""
    import sys

    import torch

    place, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        build = functools.reduce(getattr, attribute.split("."), importlib.import_module(place))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"model {name!r} cannot be imported: {one_line(error)}") from error
    finally:
        sys.path.pop(0)
    if not callable(build):
        raise ConfigError(f"model {name!r} is a {type(build).__name__}, not a function")
    try:
        with torch.device("meta"):
            module = build()
    except Exception:
        # Some code of models needs real numbers, for example to initialise weights.
        try:
            module = build()
        except Exception as error:
            raise ConfigError(f"model {name!r} failed: {one_line(error)}") from error
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"model {name!r} gave a {type(module).__name__}, not an nn.Module")
    return module


def _check(source: str, as_json: bool) -> None:
    """Print predictions beside measurements: of the paper, or of a file of `bench step`."""
    from gradwire.plan.rate import show_rate
    from gradwire.workbench.plan_check import paper
    from gradwire.workbench.plan_check.compare import compare_rows, read_bench_rows

    if source == "paper":
        _, cells = paper.fit_and_compare()
        rows = [
            (r.model, r.method, "fitted" if r.fitted else "", r.paper, r.predicted) for r in cells
        ]
    else:
        comparisons = compare_rows(read_bench_rows(Path(source)))
        rows = [
            (
                c.model, c.method, f"{c.ranks} ranks, {show_rate(c.link)}", c.measured,
                c.prediction.seconds,
            )
            for c in comparisons
        ]  # fmt: skip
    if as_json:
        names = ("model", "method", "note", "measured", "predicted")
        typer.echo(json.dumps([dict(zip(names, row, strict=True)) for row in rows]))
        return
    for model, method, note, measured, predicted in rows:
        error = f"{predicted / measured - 1:+.1%}"
        say(f"{model:13} {method:22} {note:22} {measured:9.4f} s {predicted:9.4f} s {error:>7}")
    good = sum(abs(predicted / measured - 1) <= _NEAR for *_, measured, predicted in rows)
    say(f"{good} of {len(rows)} within {_NEAR:.0%}")


def _measure() -> dict[str, Any] | None:
    """Return the measured cluster on the first rank, None on the others."""
    from gradwire.workbench.cli.link import measure_cluster
    from gradwire.workbench.train.launch import launch
    from gradwire.workbench.train.worker import under_torchrun

    if not under_torchrun():
        raise ConfigError(
            "--measure needs ranks to measure between: "
            "torchrun --nproc-per-node 4 -m gradwire plan --measure ..."
        )
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    cluster = launch(measure_cluster, workers=2, device=device, timeout=60.0)
    return cluster if cluster["rank"] == 0 else None


def _count(text: str) -> int | None:
    if not text:
        return None
    units = {"k": 10**3, "m": 10**6, "b": 10**9}
    number, unit = text.strip().lower().replace(",", ""), 1
    if number and number[-1] in units:
        number, unit = number[:-1], units[number[-1]]
    try:
        return round(float(number) * unit)
    except (ValueError, OverflowError):
        raise ConfigError(f"params must be a number such as 25557032, 7B; got {text!r}") from None


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"density takes numbers with commas between, got {text!r}") from None
