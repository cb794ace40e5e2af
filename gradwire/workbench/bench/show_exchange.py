"""Rows of `bench exchange` as a table on the terminal, and as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from gradwire.exchange import EXCHANGES
from gradwire.workbench.bench.exchange import ExchangeRow
from gradwire.workbench.bench.show import open_figure, save_figure, short_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def exchange_table(rows: Sequence[ExchangeRow]) -> Table:
    """Return a table of one line per row, at most 80 columns wide."""
    first = rows[0]
    title = (
        f"{short_count(first.size)} entries, k = {short_count(first.k)}, {first.data}, correlation "
        f"{first.correlation:g}; {first.device}; milliseconds per worker"
    )
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    right = ("P", "bytes", "/dense", "rounds", "energy", "union/k", "compress", "encode", "decode")
    table.add_column("exchange", no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.exchange, str(row.ranks), *_cells(row))
    table.caption = "\n".join(dict.fromkeys(f"{r.exchange}: {r.why}" for r in rows if r.why))
    table.caption_justify = "left"
    return table


def _cells(row: ExchangeRow) -> list[str]:
    if row.bytes is None:
        return [""] * 8
    union = "" if row.union is None else f"{row.union:.2f}"
    times = [f"{1e3 * row.seconds[name]:.3g}" for name in ("compress", "encode", "decode")]
    return [
        short_count(row.bytes), f"{row.bytes / row.dense:.3f}" if row.dense else "",
        str(row.rounds), f"{row.energy:.3f}", union, *times,
    ]  # fmt: skip


def plot_exchange(rows: Sequence[ExchangeRow], path: Path) -> None:
    """Plot bytes, rounds, energy and union against the number of workers."""
    figure, axes = open_figure(path, 2, 2, size=(10, 7))
    panels = [
        ("bytes that leave a worker", lambda r: r.bytes),
        ("rounds", lambda r: r.rounds),
        ("share of the mean gradient's energy delivered", lambda r: r.energy),
        ("entries of the update / k", lambda r: r.union),
    ]
    names = list(dict.fromkeys(row.exchange for row in rows))
    for panel, (title, value) in zip(axes.flat, panels, strict=True):
        for i, name in enumerate(names):
            points = [(r.ranks, value(r)) for r in rows if r.exchange == name]
            _line(panel, name, [(p, v) for p, v in points if v is not None], i)
        panel.set_xscale("log", base=2)
        ticks = sorted({row.ranks for row in rows})
        panel.set_xticks(ticks, [str(t) for t in ticks])
        panel.minorticks_off()
        panel.set_yscale("log")
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("workers")
        panel.grid(alpha=0.3)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    first = rows[0]
    figure.suptitle(
        f"{short_count(first.size)} entries, density {first.density:g}, {first.data} gradients "
        f"with correlation {first.correlation:g}",
        fontsize=11,
    )
    save_figure(figure, path)


def _line(axes: "Axes", name: str, points: Sequence[tuple[int, float]], i: int) -> None:
    """Draw the line of one exchange, dashed if it takes whole gradients."""
    # The marks tell lines apart that lie on each other.
    style = "--" if EXCHANGES[name].whole else "-"
    marks = "osv^D<>PX*"
    if points:
        axes.plot(
            *zip(*points, strict=True), style, marker=marks[i % len(marks)], markersize=5,
            markerfacecolor="none", label=name, linewidth=1.3,
        )  # fmt: skip
