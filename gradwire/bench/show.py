"""Rows as a table on the terminal, and as a picture of time against size."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from gradwire.bench.row import Row
from gradwire.errors import ConfigError


def as_table(rows: Sequence[Row]) -> Table:
    """One line a row, the machine above; narrow enough for 80 columns."""
    title = f"{rows[0].device}; {rows[0].versions}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    names = ("method", "size", "density", "k", "achieved", "ms", "p20", "p80", "GB/s", "ratio")
    for name in names:
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for row in rows:
        cells = (row.method, _count(row.size), f"{row.density:g}", _count(row.k))
        times = (f"{t:.4g}" for t in (row.ms, row.p20, row.p80))
        table.add_row(*cells, _count(row.achieved), *times, f"{row.gbps:,.0f}", f"{row.ratio:.2f}x")
    return table


def _count(n: int) -> str:
    """138M, 25.56M, 25.6k: what fits into a column."""
    for unit, name in ((10**6, "M"), (10**3, "k")):
        if n >= unit:
            return f"{n / unit:.4g}{name}"
    return str(n)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Time against size, both logarithmic, one line a method and density, the floor dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"a plot is a .png, .svg or .pdf file, got {path}")
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    several = len({row.density for row in rows}) > 1
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        name = row.method
        if several and name not in ("floor", "noop"):
            name += f" {row.density:g}"
        lines.setdefault(name, []).append((row.size, row.ms))
    for name, points in lines.items():
        sizes, times = zip(*sorted(set(points)), strict=True)
        axes.loglog(sizes, times, "k--" if name == "floor" else "o-", label=name, markersize=4)
    axes.set_xlabel("entries")
    axes.set_ylabel("milliseconds a step")
    axes.set_title(rows[0].device, fontsize=10)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
