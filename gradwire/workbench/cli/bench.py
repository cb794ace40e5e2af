"""The commands `gradwire bench ...`."""

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
from gradwire.workbench.bench.job import Job, split_methods
from gradwire.workbench.cli.flags import config_flag
from gradwire.workbench.cli.say import console

bench_app = typer.Typer(
    help="This machine's numbers for each stage, against the memory floor.", no_args_is_help=True
)
_DEVICE = typer.Option("", help="cpu or cuda; the GPU where there is one.")
_JSON = typer.Option(False, "--json", help="One JSON object per row.")
_SIZES = typer.Option("25557032", help="Entries, such as 6.55M; several with commas.")
_REPEAT = typer.Option(30, min=2, help="Timed calls per row.")
_Densities = Annotated[str, config_flag("density", "Several with commas.")]
_Density = Annotated[float, config_flag("density")]


@bench_app.callback()
def bench() -> None:
    """This machine's numbers for each stage, against the memory floor."""


@bench_app.command("compress")
def _compress(
    size: str = _SIZES,
    density: _Densities = str(Config.density),
    methods: str = typer.Option(
        "topk",
        help="Methods with commas; gaussiank:paper for a variant; all for every method. Also noop, "
        "and local for the whole path of 4 ranks.",
    ),
    options: Annotated[
        list[str] | None, config_flag("options", "For every method that has it. May be repeated.")
    ] = None,
    data: str = typer.Option(
        "gaussian",
        help="training:gpt or training:resnet50, optionally with @STEP: gradients of a network in "
        "training from that step on (150), whatever --size says. Or drawn: gaussian, laplace, t5, "
        "t3, gennormal, layers, network, zeros, shifted, uniform, and hard ones: equal, "
        "two-values, sorted-up, one-layer, powers, denormals, few, one-hot, constant. "
        "Several with commas.",
    ),
    data_dir: Path | None = typer.Option(
        None, help="Folder of the books or CIFAR-10 for training; without it, what is embedded."
    ),
    gradient: Path | None = typer.Option(
        None, help="A recorded gradient (train --record-gradients) in place of size and data."
    ),
    device: str = _DEVICE,
    repeat: int = _REPEAT,
    # Steps of the timing. `warmup` of Config and `gradwire train` is another thing: densities.
    warmup: int = typer.Option(5, min=1, help="Steps before the first that is timed."),
    as_json: bool = _JSON,
    plot_file: Path | None = typer.Option(None, "--plot", help="Time against size: .png .svg."),
    out: Path | None = typer.Option(None, help="A folder for a page that compares the methods."),
) -> None:
    """Time one error-feedback step (accumulate, compress, settle) of each method.

    Every table has the floor, `e.add_(g)`, which reads gradient and residual and writes the
    residual. It also has torch.topk of the same vector. n/k: entries chosen over entries wanted,
    in a first step. energy, recall: the chosen entries of that step against the exact top k. timed:
    n/k of the last timed step, because a fixed threshold takes some steps to find entries.
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
    rows = _collect(
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
            data_dir=data_dir,
        ),
        as_json,
    )
    if not as_json:
        console.print(compress_table(rows))
    if plot_file is not None:
        plot_times(rows, plot_file)
    if out is not None:
        console.print(f"{write_methods_page(rows, out)}", soft_wrap=True)


@bench_app.command("encode")
def _encode(
    size: str = _SIZES,
    density: _Densities = str(Config.density),
    encodings: str = typer.Option(
        "", help="VALUES+INDICES or VALUES+INDICES+stochastic, with commas; a selection of them."
    ),
    device: str = _DEVICE,
    repeat: int = _REPEAT,
    as_json: bool = _JSON,
) -> None:
    """Measure the bits per entry and the time to encode and decode a message.

    The time of the selection step stands beside them.
    """
    from gradwire.workbench.bench import bench_encode
    from gradwire.workbench.bench.encode import ENCODINGS, encode_table

    rows = _collect(
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


@bench_app.command("exchange")
def _exchange(
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
    correlation: float = typer.Option(
        0.0, help="Correlation of any two workers' gradients, 0 to 1."
    ),
    options: Annotated[
        list[str] | None, config_flag("options", "For every exchange that has it. May be repeated.")
    ] = None,
    steps: int = typer.Option(
        3, min=2, help="Steps per row; the first is not timed, nor the second on a GPU."
    ),
    device: str = _DEVICE,
    as_json: bool = _JSON,
    plot_file: Path | None = typer.Option(None, "--plot", help="Against workers: .png .svg."),
) -> None:
    """Measure each exchange among virtual workers: bytes, rounds, time per stage, energy.

    energy: the part of the mean gradient's energy that the update of a first step delivers.
    union/k: entries of that update over k. Virtual workers have no network: bytes and rounds are
    counted, and times are the work of one worker.
    """
    from gradwire.exchange import EXCHANGES
    from gradwire.workbench.bench import bench_exchange
    from gradwire.workbench.bench.show import check_picture
    from gradwire.workbench.bench.show_exchange import exchange_table, plot_exchange

    check_picture(plot_file)
    rows = _collect(
        bench_exchange(
            [_entries(p, "ranks") for p in _split(ranks)],
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


@bench_app.command("step")
def _step(
    model: str = typer.Option("resnet20", help="A network of gradwire.workbench.models."),
    ranks: int = typer.Option(4, help="Ranks to start; under torchrun, those of torchrun."),
    islands: str = typer.Option(
        "", help="2x2: two islands of two ranks, with fast links inside, in place of --ranks."
    ),
    link: str = typer.Option(
        "", help="A link of the lab: 100mbit, 1gbit, 10gbit. Otherwise on loopback."
    ),
    latency: str = typer.Option("0ms", help="Latency of the lab's link, one way: 5ms, 200us."),
    methods: str = typer.Option(
        "noop,dense,topk",
        help="With commas, noop first. PyTorch's: noop, dense, bf16, powersgd-1, -2, -4, -8. "
        "Ours: METHOD or METHOD/EXCHANGE, e.g. topk/union, topk:bundle_mb=100. Local steps: never, "
        "muon, muon-wan, muon:overlap=3.",
    ),
    density: _Density = Config.density,
    # Not Config's defaults: the comparison with PyTorch's hooks is for the fewest bytes.
    values: Annotated[str, config_flag("values")] = Job.values,
    indices: Annotated[str, config_flag("indices")] = Job.indices,
    batch: int = typer.Option(32, help="Examples per rank."),
    iterations: int = typer.Option(50, help="Timed steps of each method, in turns of 10."),
    optimizer: str = typer.Option(
        "sgd", help="Steps with averaged gradients: sgd, adamw, muon. Local steps have muon."
    ),
    seconds: float = typer.Option(
        0.0, help="Stop timing a method after these seconds; 0 is never."
    ),
    at_most: float = typer.Option(
        0.0, help="Seconds for all methods, after the start of the ranks; 0 is no limit."
    ),
    autocast: str = typer.Option("fp32", help="bf16, or fp32 for none."),
    bucket_mb: float = typer.Option(0.0, help="Size of DDP's buckets; 0 for DDP's default."),
    device: str = _DEVICE,
    as_json: bool = _JSON,
    trace: Path | None = typer.Option(None, help="A folder for a timeline of each method."),
    alone: bool = typer.Option(
        False, "--alone", help="Also each method without a network, for `gradwire plan --check`."
    ),
) -> None:
    """Train real steps on P ranks with each method in turn: seconds, efficiency, bytes, stages.

    efficiency: the step of noop, which sends nothing, over that of the method. exposed: the time
    that a method adds to noop. hidden: the other time of its stages. Inputs are synthetic. Local
    steps have the mean step of a round, and never in place of noop.
    """
    from gradwire.plan.rate import parse_time
    from gradwire.workbench.bench.show import check_folder
    from gradwire.workbench.bench.show_step import WIDTH, step_tables
    from gradwire.workbench.bench.start import bench_step
    from gradwire.workbench.cli.lab import INTERRUPTED, leave_on_signals
    from gradwire.workbench.cli.say import complain, errors
    from gradwire.workbench.lab.islands import parse_islands

    if trace is not None:
        check_folder(trace)
    count, inside = parse_islands(islands)
    job = Job(
        model, split_methods(methods), batch, iterations, density, values, indices, autocast,
        _device_kind(device), seconds, bucket_mb, link,
        trace="" if trace is None else str(trace.absolute()), alone=alone,
        delay=parse_time(latency), at_most=at_most, optimizer=optimizer, islands=count,
    )  # fmt: skip
    leave_on_signals()
    try:
        rows = bench_step(job, count * inside or ranks, errors.print)
    except KeyboardInterrupt:
        complain("stopped; nothing is left running.")
        raise typer.Exit(INTERRUPTED) from None
    if int(os.environ.get("RANK", 0)):
        return
    if as_json:
        for row in rows:
            print(json.dumps(row), flush=True)
    else:
        # Wide enough for the table: a narrow terminal wraps lines, rich would cut numbers off.
        Console(width=max(WIDTH, console.width)).print(step_tables(rows))


_Row = TypeVar("_Row", bound=Any)


def _collect(rows: Iterable[_Row], as_json: bool) -> list[_Row]:
    """Return all rows; with `as_json` print each as soon as it is measured."""
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


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name} must be a number, got {text!r}") from None


def _entries(text: str, name: str = "size") -> int:
    """Return the number in a text such as 25557032, 25.6M or 2e6; `name` is for the error."""
    factor = {"k": 10**3, "M": 10**6, "G": 10**9}.get(text[-1], 1)
    return round(_number(text if factor == 1 else text[:-1], name) * factor)


def _device(name: str) -> torch.device:
    if _device_kind(name) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return _parse_device(name)


def _device_kind(name: str) -> str:
    """Return cpu or cuda without use of the GPU, because the ranks may share it under MPS."""
    kind = _parse_device(name).type if name else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: torch finds no GPU here. Use --device cpu.")
    return kind


def _parse_device(name: str) -> torch.device:
    try:
        return torch.device(name or "cpu")
    except RuntimeError:
        raise ConfigError(f"device must be cpu or cuda, got {name!r}") from None
