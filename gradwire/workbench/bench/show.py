"""Rows of `bench compress` as a table on the terminal, and as a picture of time against size.

The helpers for pictures serve the other benchmarks too.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from gradwire.errors import ConfigError
from gradwire.workbench.bench.row import Row
from gradwire.workbench.bench.training import PREFIX


def compress_table(rows: Sequence[Row]) -> Table:
    """Return a table of one line per row, the machine above; at most 80 columns wide."""
    title = f"{rows[0].device}; {rows[0].versions}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    left = ("method", "data")
    right = ("size", "density", "n/k", "energy", "recall", "timed", "ms", "ratio")
    for name in left + right:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in rows:
        cells = (
            row.method,
            row.data.removeprefix(PREFIX),
            short_count(row.size),
            f"{row.density:g}",
        )
        quality = ("" if x is None else f"{x:.3g}" for x in (row.energy, row.recall))
        share, timed = f"{row.achieved / row.k:.3g}", f"{row.timed / row.k:.3g}"
        table.add_row(*cells, share, *quality, timed, f"{row.ms:.4g}", f"{row.ratio:.2f}x")
    return table


def short_count(n: int) -> str:
    """Return n in at most six characters: 138M, 25.56M, 25.6k."""
    for unit, name in ((10**6, "M"), (10**3, "k")):
        if n >= unit:
            return f"{n / unit:.4g}{name}"
    return str(n)


def plot_times(rows: Sequence[Row], path: Path) -> None:
    """Plot time against size, both logarithmic: a line per method and density, the floor dashed."""
    figure, axes = open_figure(path, size=(7, 4.5))
    several_densities = len({row.density for row in rows}) > 1
    several_kinds = len({row.data for row in rows}) > 1
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        name = row.method
        if several_densities and name not in ("floor", "noop"):
            name += f" {row.density:g}"
        if several_kinds and name not in ("floor", "noop"):
            name += f" {row.data}"
        lines.setdefault(name, []).append((row.size, row.ms))
    for name, points in lines.items():
        sizes, times = zip(*sorted(set(points)), strict=True)
        axes.loglog(sizes, times, "k--" if name == "floor" else "o-", label=name, markersize=4)
    axes.set_xlabel("entries")
    axes.set_ylabel("milliseconds per step")
    axes.set_title(rows[0].device, fontsize=10)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    save_figure(figure, path)


def open_figure(path: Path, *shape: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """Return a new figure and its axes, for a machine without a screen; check the path first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    check_picture(path)
    return pyplot.subplots(*shape, figsize=size, layout="constrained")


def check_picture(path: Path | None) -> None:
    """Raise if `path` cannot become a picture; make its folder."""
    if path is not None and path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"a plot is a .png, .svg or .pdf file, got {path}")
    if path is not None:
        check_folder(path.parent)


def check_folder(folder: Path) -> None:
    """Make the folder, or raise if nothing can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{folder} cannot be written to")


def save_figure(figure: Any, path: Path) -> None:
    """Write the figure to `path`, and free its memory."""
    from matplotlib import pyplot

    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        pyplot.close(figure)
