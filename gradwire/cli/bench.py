"""`gradwire bench ...`."""

import json
from pathlib import Path

import torch
import typer

from gradwire.cli.say import console
from gradwire.errors import ConfigError

bench_app = typer.Typer(
    help="This machine's numbers for each stage, against the memory floor.", no_args_is_help=True
)


@bench_app.callback()
def bench() -> None:
    """This machine's numbers for each stage, against the memory floor."""


@bench_app.command()
def compress(
    size: str = typer.Option("25557032", help="Entries; several with commas, 6.55M is a number."),
    density: str = typer.Option("0.001", help="The share that is sent; several with commas."),
    methods: str = typer.Option(
        "topk", help="Methods with commas; also noop, and local for the whole path of 4 ranks."
    ),
    device: str = typer.Option("", help="cpu or cuda; the GPU where there is one."),
    repeat: int = typer.Option(30, min=2, help="Timed calls a row."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object a row."),
    plot_file: Path | None = typer.Option(None, "--plot", help="Time against size: .png .svg."),
) -> None:
    """Time one error-feedback step (accumulate, compress, settle) of each method.

    Every table has the floor, `e.add_(g)`, which reads gradient and residual and writes the
    residual, and torch.topk of the same vector.
    """
    from gradwire.bench import bench_compress
    from gradwire.bench.show import as_table, plot

    place = _device(device)
    rows = []
    for row in bench_compress(
        [_entries(s) for s in _split(size)],
        [_number(d, "density") for d in _split(density)],
        _split(methods),
        place,
        repeat,
    ):
        rows.append(row)
        if as_json:
            print(json.dumps(row.asdict()), flush=True)
    if not as_json:
        console.print(as_table(rows))
    if plot_file is not None:
        plot(rows, plot_file)


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
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device must be cpu or cuda, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: torch finds no GPU here. Use --device cpu.")
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
