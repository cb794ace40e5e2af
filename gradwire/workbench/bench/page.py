"""An HTML page that compares methods: their time, the entries they choose, and the quality."""

import io
import os
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from gradwire.workbench.bench.row import Row
from gradwire.workbench.bench.show import short_count
from gradwire.workbench.report.curves import (
    COLOURS,
    FAINT,
    INK,
    escape_dollars,
    inline_svg,
    style_axes,
)
from gradwire.workbench.report.page import STYLE

PAGE = "methods.html"
CHARTS: tuple[tuple[str, Callable[[Row], float | None], float], ...] = (
    ("Time of a step over the memory floor", lambda r: r.ratio, 1),
    (
        "Entries chosen over entries asked for (n/k)",
        lambda r: _if_selects(r, r.achieved / r.k),
        1,
    ),
    ("Energy chosen over that of the exact top k", lambda r: r.energy, 1),
    ("Share of the exact top k that was found", lambda r: r.recall, 1),
)
SHAPES = (("o", "&#9679;"), ("s", "&#9632;"), ("D", "&#9670;"), ("^", "&#9650;"))
COLUMNS = ("Method", "Data", "Entries", "Density", "n/k", "Energy", "Recall", "ms", "Of the floor")


def write_methods_page(rows: Sequence[Row], folder: Path) -> Path:
    """Write `folder`/methods.html, one file without outside resources, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    # Replaced at once, so a reader never sees half a page.
    scratch = folder / (PAGE + ".tmp")
    scratch.write_text(_render_page(rows), encoding="utf-8", errors="xmlcharrefreplace")
    os.replace(scratch, folder / PAGE)
    return folder / PAGE


def _render_page(rows: Sequence[Row]) -> str:
    """Return the page as HTML."""
    groups = _group_rows(rows)
    keys = "".join(
        f'<li><b style="color:{colour}">{sign}</b> {escape(name)}</li>'
        for name, (colour, _, sign) in zip(groups, _styles(groups), strict=True)
    )
    figures = "".join(
        f'<figure role="img" aria-label="{escape(caption)}"><figcaption>{escape(caption)}'
        f"</figcaption>{_chart(groups, value, caption, mark)}</figure>"
        for caption, value, mark in CHARTS
    )
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    lines = "".join(f"<tr>{''.join(f'<td>{c}</td>' for c in _cells(row))}</tr>" for row in rows)
    title = "What each method chooses, and what it costs"
    about = f"{rows[0].device}; {rows[0].versions}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body><main>\n"
        f'<p class="kicker">gradwire &middot; {escape(about)}</p>\n<h1>{title}</h1>\n'
        f'<ul class="legend">{keys}</ul>\n<div class="charts">{figures}</div>\n'
        f'<h2>All numbers</h2>\n<div class="scroll"><table class="numbers"><thead><tr>{head}</tr>'
        f"</thead><tbody>{lines}</tbody></table></div>\n"
        '<p class="note">The floor is e.add_(g): read gradient and residual, write the residual. '
        "Times are medians of one error-feedback step; n, energy and recall are of a first step, "
        "without a residual.</p>\n</main></body>\n</html>\n"
    )


def _if_selects(row: Row, value: float) -> float | None:
    """Return `value` for a row of a method that selects entries, None for any other row."""
    return value if row.energy is not None else None


def _group_rows(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group rows by size, density and kind of data; a property that all rows share is left out.

    The keys are the groups' names in the legend.
    """
    fields = ("data", "size", "density")
    differ = [f for f in fields if len({getattr(r, f) for r in rows}) > 1] or ["data"]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        words = {
            "data": row.data,
            "size": short_count(row.size),
            "density": f"{100 * row.density:g} %",
        }
        groups.setdefault(", ".join(words[f] for f in differ), []).append(row)
    return groups


def _styles(groups: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return (colour, matplotlib's marker, the same marker as an HTML entity) for each group."""
    n = len(COLOURS)
    return [(COLOURS[i % n], *SHAPES[i // n % len(SHAPES)]) for i in range(len(groups))]


def _chart(
    groups: dict[str, list[Row]], value: Callable[[Row], float | None], salt: str, mark: float
) -> str:
    """Draw one chart as SVG: one dot per row, one line per method.

    mark: the value of an exact choice at no cost, drawn as a dashed line. salt: makes the ids in
    the SVG the same in every run.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    points = [(row.method, value(row)) for rows in groups.values() for row in rows]
    methods = list(dict.fromkeys(name for name, v in points if v is not None))[::-1]
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": salt, "font.family": "sans-serif"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(4.6, 1.0 + 0.24 * len(methods)), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for rows, (colour, shape, _) in zip(groups.values(), _styles(groups), strict=True):
            dots = [(v, methods.index(r.method)) for r in rows if (v := value(r)) is not None]
            x, y = [v for v, _ in dots], [line for _, line in dots]
            axes.scatter(x, y, s=26, color=colour, marker=shape, alpha=0.85, linewidths=0)
        values = [v for _, v in points if v]
        if values and max(values) > 5 * min(values):
            axes.set_xscale("log")
        axes.axvline(mark, color=INK, linewidth=0.8, linestyle="--")
        axes.set_yticks(range(len(methods)), [escape_dollars(name) for name in methods])
        axes.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
        style_axes(axes, INK, FAINT)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return inline_svg(out.getvalue())


def _cells(row: Row) -> list[str]:
    """Return the row's cells of the table, as HTML."""
    share = _if_selects(row, row.achieved / row.k)
    numbers = ["-" if v is None else f"{v:.3g}" for v in (share, row.energy, row.recall)]
    return [
        escape(row.method), escape(row.data), f"{row.size:,}", f"{100 * row.density:g} %",
        *numbers, f"{row.ms:.4g}", f"{row.ratio:.2f}x",
    ]  # fmt: skip
