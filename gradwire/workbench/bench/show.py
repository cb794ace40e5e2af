"""Rows as a table on the terminal, and as a picture of time against size."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from gradwire.errors import ConfigError
from gradwire.workbench.bench.row import Row


def as_table(rows: Sequence[Row]) -> Table:
    """One line a row, the machine above; narrow enough for 80 columns."""
    title = f"{rows[0].device}; {rows[0].versions}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    left = ("method", "data")
    right = ("size", "density", "n/k", "energy", "recall", "timed", "ms", "ratio")
    for name in left + right:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in rows:
        cells = (row.method, row.data, as_count(row.size), f"{row.density:g}")
        found = ("" if x is None else f"{x:.3g}" for x in (row.energy, row.recall))
        share, timed = f"{row.achieved / row.k:.3g}", f"{row.timed / row.k:.3g}"
        table.add_row(*cells, share, *found, timed, f"{row.ms:.4g}", f"{row.ratio:.2f}x")
    return table


def as_count(n: int) -> str:
    """138M, 25.56M, 25.6k: what fits into a column."""
    for unit, name in ((10**6, "M"), (10**3, "k")):
        if n >= unit:
            return f"{n / unit:.4g}{name}"
    return str(n)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Time against size, both logarithmic, one line a method and density, the floor dashed."""
    figure, axes = open_figure(path, size=(7, 4.5))
    several = len({row.density for row in rows}) > 1
    kinds = len({row.data for row in rows}) > 1
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        name = row.method
        if several and name not in ("floor", "noop"):
            name += f" {row.density:g}"
        if kinds and name not in ("floor", "noop"):
            name += f" {row.data}"
        lines.setdefault(name, []).append((row.size, row.ms))
    for name, points in lines.items():
        sizes, times = zip(*sorted(set(points)), strict=True)
        axes.loglog(sizes, times, "k--" if name == "floor" else "o-", label=name, markersize=4)
    axes.set_xlabel("entries")
    axes.set_ylabel("milliseconds a step")
    axes.set_title(rows[0].device, fontsize=10)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    save_figure(figure, path)


def open_figure(path: Path, *shape: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure and its axes, without a screen; the file's name is checked before any work."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    check_picture(path)
    return pyplot.subplots(*shape, figsize=size, layout="constrained")


def check_picture(path: Path | None) -> None:
    """Raises for a file that cannot be a picture."""
    if path is not None and path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"a plot is a .png, .svg or .pdf file, got {path}")
    if path is not None:
        check_folder(path.parent)


def check_folder(folder: Path) -> None:
    """Makes it, or raises before anything is measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{folder} cannot be written to")


def save_figure(figure: Any, path: Path) -> None:
    """Write it and forget it."""
    from matplotlib import pyplot

    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        pyplot.close(figure)
