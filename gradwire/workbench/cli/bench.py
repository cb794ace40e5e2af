"""`gradwire bench ...`."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console

from gradwire.config import Config
from gradwire.errors import ConfigError
from gradwire.workbench.bench.job import Job
from gradwire.workbench.cli.flags import config_flag
from gradwire.workbench.cli.say import console

bench_app = typer.Typer(
    help="This machine's numbers for each stage, against the memory floor.", no_args_is_help=True
)
DEVICE = typer.Option("", help="cpu or cuda; the GPU where there is one.")
JSON = typer.Option(False, "--json", help="One JSON object a row.")
SIZES = typer.Option("25557032", help="Entries; several with commas, 6.55M is a number.")
REPEAT = typer.Option(30, min=2, help="Timed calls a row.")
_Densities = Annotated[str, config_flag("density", "Several with commas.")]
_Density = Annotated[float, config_flag("density")]


@bench_app.callback()
def bench() -> None:
    """This machine's numbers for each stage, against the memory floor."""


@bench_app.command()
def compress(
    size: str = SIZES,
    density: _Densities = str(Config.density),
    methods: str = typer.Option(
        "topk",
        help="Methods with commas, gaussiank:paper for a variant, all for every method; also noop, "
        "and local for the whole path of 4 ranks.",
    ),
    options: Annotated[
        list[str] | None, config_flag("options", "For every method that has it. May be repeated.")
    ] = None,
    data: str = typer.Option(
        "gaussian", help="gaussian, laplace, t3, layers, network, zeros; or several."
    ),
    gradient: Path | None = typer.Option(
        None, help="A recorded gradient (train --record-gradients) in place of size and data."
    ),
    device: str = DEVICE,
    repeat: int = REPEAT,
    # Of the timing. The warm-up of a run, in Config and `gradwire train`, is of densities.
    warmup: int = typer.Option(5, min=1, help="Steps before the first that is timed."),
    as_json: bool = JSON,
    plot_file: Path | None = typer.Option(None, "--plot", help="Time against size: .png .svg."),
    out: Path | None = typer.Option(None, help="A folder for a page that compares the methods."),
) -> None:
    """Time one error-feedback step (accumulate, compress, settle) of each method.

    Every table has the floor, `e.add_(g)`, which reads gradient and residual and writes the
    residual, and torch.topk of the same vector. n/k: entries chosen over entries asked for, in a
    first step. energy, recall: what was chosen there against the exact top k. timed: n/k of the
    last step that was timed; a fixed threshold takes some steps to find entries.
    """
    from gradwire.compress import METHODS
    from gradwire.workbench.bench import bench_compress
    from gradwire.workbench.bench.data import read_gradient
    from gradwire.workbench.bench.page import write_methods_page
    from gradwire.workbench.bench.show import (
        check_folder,
        check_picture,
        compress_table,
        plot_times,
    )

    check_picture(plot_file)
    if out is not None:
        check_folder(out)
    rows = _show(
        bench_compress(
            [_entries(s) for s in _split(size)],
            [_number(d, "density") for d in _split(density)],
            list(METHODS) if methods == "all" else _split(methods),
            _device(device),
            repeat,
            warmup,
            data=_split(data),
            recorded=None if gradient is None else (gradient.stem, read_gradient(gradient)),
            options=options or [],
        ),
        as_json,
    )
    if not as_json:
        console.print(compress_table(rows))
    if plot_file is not None:
        plot_times(rows, plot_file)
    if out is not None:
        console.print(f"{write_methods_page(rows, out)}", soft_wrap=True)


@bench_app.command()
def encode(
    size: str = SIZES,
    density: _Densities = str(Config.density),
    encodings: str = typer.Option(
        "", help="VALUES+INDICES or VALUES+INDICES+stochastic, with commas; a selection of them."
    ),
    device: str = DEVICE,
    repeat: int = REPEAT,
    as_json: bool = JSON,
) -> None:
    """Bits an entry, and the time to encode and decode a message, against the selection step."""
    from gradwire.workbench.bench import bench_encode
    from gradwire.workbench.bench.encode import ENCODINGS, encode_table

    rows = _show(
        bench_encode(
            [_entries(s) for s in _split(size)],
            [_number(d, "density") for d in _split(density)],
            _split(encodings) or ENCODINGS,
            _device(device),
            repeat,
        ),
        as_json,
    )
    if not as_json:
        console.print(encode_table(rows))


@bench_app.command()
def exchange(
    ranks: str = typer.Option("2,4,8,16,32,64", help="Virtual workers; several with commas."),
    size: str = typer.Option("200k", help="Entries."),
    density: _Density = Config.density,
    exchanges: str = typer.Option("", help="Exchanges with commas; all of them."),
    method: Annotated[str, config_flag("method")] = Config.method,
    values: Annotated[
        str, config_flag("values", "An exchange that cannot send these values sends fp32.")
    ] = Config.values,
    indices: Annotated[str, config_flag("indices")] = Config.indices,
    data: str = typer.Option("gaussian", help="gaussian, laplace, t3, layers, network or zeros."),
    correlation: float = typer.Option(0.0, help="Of any two workers' gradients, 0 to 1."),
    options: Annotated[
        list[str] | None, config_flag("options", "For every exchange that has it. May be repeated.")
    ] = None,
    steps: int = typer.Option(
        3, min=2, help="Steps a row; the first is not timed, nor the second of a GPU."
    ),
    device: str = DEVICE,
    as_json: bool = JSON,
    plot_file: Path | None = typer.Option(None, "--plot", help="Against workers: .png .svg."),
) -> None:
    """Bytes, rounds, time a stage and what arrives, for each exchange among virtual workers.

    energy: of the mean gradient's energy, what the update of a first step delivers. union/k:
    entries of that update over k. Virtual workers have no network: bytes and rounds are counted,
    times are one worker's own work.
    """
    from gradwire.exchange import EXCHANGES
    from gradwire.workbench.bench import bench_exchange
    from gradwire.workbench.bench.show import check_picture
    from gradwire.workbench.bench.show_exchange import exchange_table, plot_exchange

    check_picture(plot_file)
    rows = _show(
        bench_exchange(
            [_entries(p) for p in _split(ranks)],
            _entries(size),
            density,
            _split(exchanges) or list(EXCHANGES),
            _device(device),
            method=method,
            values=values,
            indices=indices,
            data=data,
            correlation=correlation,
            options=options or [],
            steps=steps,
        ),
        as_json,
    )
    if not as_json:
        console.print(exchange_table(rows))
    if plot_file is not None:
        plot_exchange(rows, plot_file)


@bench_app.command()
def step(
    model: str = typer.Option("resnet20", help="A network of gradwire.workbench.models."),
    ranks: int = typer.Option(4, help="Ranks; under torchrun they are there already."),
    link: str = typer.Option("", help="100mbit, 1gbit, 10gbit: in the lab; else on loopback."),
    latency: str = typer.Option("0ms", help="Of the lab, one way: 5ms, 200us."),
    methods: str = typer.Option(
        "noop,dense,topk",
        help="With commas, noop first. PyTorch's: noop, dense, bf16, powersgd-1, -2, -4, -8. "
        "Ours: METHOD or METHOD/EXCHANGE, e.g. topk/union, topk:bundle_mb=100.",
    ),
    density: _Density = Config.density,
    # Not Config's defaults: the fewest bytes are compared with PyTorch's own hooks.
    values: Annotated[str, config_flag("values")] = Job.values,
    indices: Annotated[str, config_flag("indices")] = Job.indices,
    batch: int = typer.Option(32, help="Examples a rank."),
    iterations: int = typer.Option(50, help="Timed steps of each method, in rounds of 10."),
    seconds: float = typer.Option(
        0.0, help="A method that has taken this long is not timed further; 0 is never."
    ),
    at_most: float = typer.Option(
        0.0, help="Seconds for all methods, once the ranks have started; 0 is no limit."
    ),
    autocast: str = typer.Option("fp32", help="bf16, or fp32 for none."),
    bucket_mb: float = typer.Option(0.0, help="DDP's buckets; 0 as DDP has them."),
    device: str = DEVICE,
    as_json: bool = JSON,
    trace: Path | None = typer.Option(None, help="A folder for a timeline of each method."),
    alone: bool = typer.Option(
        False, "--alone", help="Also each method without a network, for `gradwire plan --check`."
    ),
) -> None:
    """Train real steps on P ranks with each method in turn: seconds, efficiency, bytes, stages.

    efficiency: the step of noop, which sends nothing, over that of the method. exposed: what a
    method adds to noop; hidden: the time of its stages that it does not. Inputs are synthetic.
    """
    from gradwire.plan.rate import parse_time
    from gradwire.workbench.bench.show import check_folder
    from gradwire.workbench.bench.show_step import WIDTH, step_tables
    from gradwire.workbench.bench.start import bench_step
    from gradwire.workbench.cli.lab import INTERRUPTED, leave_on_signals
    from gradwire.workbench.cli.say import complain, errors

    if trace is not None:
        check_folder(trace)
    job = Job(
        model, tuple(_split(methods)), batch, iterations, density, values, indices, autocast,
        _kind(device), seconds, bucket_mb, link,
        trace="" if trace is None else str(trace.absolute()), alone=alone,
        delay=parse_time(latency), at_most=at_most,
    )  # fmt: skip
    leave_on_signals()
    try:
        rows = bench_step(job, ranks, errors.print)
    except KeyboardInterrupt:
        complain("stopped; nothing is left running.")
        raise typer.Exit(INTERRUPTED) from None
    if int(os.environ.get("RANK", 0)):
        return
    if as_json:
        for row in rows:
            print(json.dumps(row), flush=True)
    else:
        # A narrow terminal wraps the lines: parts of numbers are no use.
        Console(width=max(WIDTH, console.width)).print(step_tables(rows))


Row = TypeVar("Row", bound=Any)


def _show(rows: Iterable[Row], as_json: bool) -> list[Row]:
    """All rows; as JSON each is printed as soon as it is there."""
    out = []
    for row in rows:
        out.append(row)
        if as_json:
            print(json.dumps(row.asdict()), flush=True)
    if not out:
        raise ConfigError("nothing to measure: name at least one")
    return out


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _number(text: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{what} must be a number, got {text!r}") from None


def _entries(text: str) -> int:
    """25557032, 25.6M or 2e6."""
    factor = {"k": 10**3, "M": 10**6, "G": 10**9}.get(text[-1], 1)
    return round(_number(text if factor == 1 else text[:-1], "size") * factor)


def _device(name: str) -> torch.device:
    kind = _kind(name)
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else _named(name)


def _kind(name: str) -> str:
    """cpu or cuda, without touching the GPU: ranks are to share it under a service of theirs."""
    kind = _named(name).type if name else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: torch finds no GPU here. Use --device cpu.")
    return kind


def _named(name: str) -> torch.device:
    try:
        return torch.device(name or "cpu")
    except RuntimeError:
        raise ConfigError(f"device must be cpu or cuda, got {name!r}") from None
