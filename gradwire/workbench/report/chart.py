"""A chart as data, drawn as PNG or as SVG that takes its ink from the page."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

from gradwire.workbench.report.curves import COLOURS, FAINT, INK, dress, inline, unset

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

STYLES: dict[str, dict[str, Any]] = {
    "line": {"linewidth": 1.6},
    "dots": {"linewidth": 1.2, "marker": "o", "markersize": 3.5},
    "points": {"linewidth": 0, "marker": "o", "markersize": 3.5},
    "dashes": {"linewidth": 1.3, "linestyle": (0, (5, 3))},
    "dotted": {"linewidth": 1.3, "linestyle": (0, (1, 2))},
}
AGAIN: dict[str, Any] = {"linestyle": (0, (4, 1.2, 1, 1.2))}
"""How lines differ that have a colour for the second time."""
GREY = "#8a8f98"
MORE = ("#17a2b8", "#d6336c", "#6f7c12", "#7a5a3a")
"""Charts have more lines than run reports."""
MANY = 6
"""Lines beyond which the legend stands beside them, not on them."""


@dataclass(frozen=True)
class Line:
    """One line; without a colour it gets the next free one."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    style: str = "line"
    colour: str = ""


@dataclass(frozen=True)
class Chart:
    """Lines over two axes. `name` is the file's, `caption` stands above it."""

    name: str
    caption: str
    x: str
    y: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False
    y_range: tuple[float, float] | None = None

    def within(self, low: float, high: float) -> "Chart":
        """The same chart, its y axis from `low` to `high`."""
        return replace(self, y_range=(low, high))


def shades(count: int) -> list[str]:
    """Colours from light to dark, for lines that follow one another."""
    light, dark = (0xA9, 0xCB, 0xF5), (0x1F, 0x4F, 0xB5)
    steps = [i / max(1, count - 1) for i in range(count)]
    mixed = ([round(a + (b - a) * s) for a, b in zip(light, dark, strict=True)] for s in steps)
    return ["#{:02x}{:02x}{:02x}".format(*colour) for colour in mixed]


def svg(chart: Chart) -> str:
    """The chart as an SVG element for a page."""
    import matplotlib

    style: Any = {"svg.fonttype": "none", "svg.hashsalt": chart.name, "font.family": "sans-serif"}
    with matplotlib.rc_context(style):
        out = io.StringIO()
        figure = _draw(chart, INK, FAINT)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return inline(out.getvalue())


def png(chart: Chart) -> bytes:
    """The chart as a picture on white, its caption above."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = _draw(chart, "#1d2129", "#dfe3e8")
    FigureCanvasAgg(figure)
    figure.suptitle(unset(chart.caption), fontsize=9, color="#1d2129", x=0.01, ha="left")
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=160, facecolor="white", metadata={"Software": None})
    return out.getvalue()


def _draw(chart: Chart, ink: str, faint: str) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.4), layout="constrained")
    axes = figure.add_subplot()
    free = cycle((colour, more) for more in ({}, AGAIN) for colour in COLOURS + MORE)
    for line in chart.lines:
        colour, more = (line.colour, {}) if line.colour else next(free)
        style = STYLES[line.style] | more
        axes.plot(line.xs, line.ys, color=colour, label=unset(line.label), **style)
    if chart.log_x:
        axes.set_xscale("log")
        _ticks(axes.xaxis, [x for line in chart.lines for x in line.xs], few=8)
    elif all(float(x).is_integer() for line in chart.lines for x in line.xs):
        axes.locator_params(axis="x", integer=True)
    if chart.log_y:
        axes.set_yscale("log")
        _ticks(axes.yaxis, chart.y_range or [y for line in chart.lines for y in line.ys])
    if chart.y_range:
        axes.set_ylim(*chart.y_range)
    axes.set_xlabel(unset(chart.x), fontsize=9, color=ink)
    axes.set_ylabel(unset(chart.y), fontsize=9, color=ink)
    dress(axes, ink, faint)
    if len(chart.lines) > MANY:
        figure.legend(fontsize=6.5, frameon=False, labelcolor=ink, loc="outside right center")
    elif any(line.label for line in chart.lines):
        axes.legend(fontsize=7.5, frameon=False, labelcolor=ink)
    return figure


def _ticks(axis: "Axis", values: Sequence[float], few: int = 0) -> None:
    """The values themselves where they are few, else powers of ten, with 2 and 5 if they span
    little; plain numbers unless that is long."""
    from matplotlib.ticker import (
        FixedLocator,
        LogFormatterSciNotation,
        LogLocator,
        StrMethodFormatter,
    )

    seen = [v for v in values if v > 0]
    low, high = min(seen), max(seen)
    if len(set(seen)) <= few:
        axis.set_major_locator(FixedLocator(sorted(set(seen))))
    else:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 200 * low else (1.0,)))
    plain = low >= 0.01 and high < 10_000
    axis.set_major_formatter(StrMethodFormatter("{x:g}") if plain else LogFormatterSciNotation())
