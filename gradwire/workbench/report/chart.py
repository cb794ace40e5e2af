"""Describe a chart as data, and draw it as PNG or SVG.

The SVG takes the colour of its text and grid from the page that it stands in.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

from gradwire.workbench.report.curves import (
    COLOURS,
    FAINT,
    INK,
    escape_dollars,
    inline_svg,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

STYLES: dict[str, dict[str, Any]] = {
    "line": {"linewidth": 1.6},
    "dots": {"linewidth": 1.2, "marker": "o", "markersize": 3.5},
    "points": {"linewidth": 0, "marker": "o", "markersize": 3.5},
    "dashes": {"linewidth": 1.3, "linestyle": (0, (5, 3))},
    "dotted": {"linewidth": 1.3, "linestyle": (0, (1, 2))},
}
REUSED_COLOUR: dict[str, Any] = {"linestyle": (0, (4, 1.2, 1, 1.2))}
"""Style of a line whose colour another line already has."""
GREY = "#8a8f98"
MORE_COLOURS = ("#17a2b8", "#d6336c", "#6f7c12", "#7a5a3a")
"""Colours after COLOURS, because charts have more lines than run reports."""
LETTER, LABEL = 5.5, 13.0
"""The width of a letter and the height of a label beside a point, in pixels of a drawing."""
LEGEND_INSIDE = 6
"""Up to this number of lines the legend stands inside the axes, else beside them."""


@dataclass(frozen=True)
class Line:
    """One line. Without a colour it gets the next free one."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    style: str = "line"
    colour: str = ""


@dataclass(frozen=True)
class Chart:
    """Lines over two axes.

    name: the file name, without suffix. caption: stands above the chart. x, y: the axis labels.
    named_points: True: each line's label stands beside its last point, and there is no legend.
    """

    name: str
    caption: str
    x: str
    y: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False
    y_range: tuple[float, float] | None = None
    named_points: bool = False

    def with_y_range(self, low: float, high: float) -> "Chart":
        """Return the same chart with a y axis from `low` to `high`."""
        return replace(self, y_range=(low, high))


def shades(count: int) -> list[str]:
    """Return `count` colours from light to dark, for lines that are in an order."""
    light, dark = (0xA9, 0xCB, 0xF5), (0x1F, 0x4F, 0xB5)
    steps = [i / max(1, count - 1) for i in range(count)]
    mixed = ([round(a + (b - a) * s) for a, b in zip(light, dark, strict=True)] for s in steps)
    return ["#{:02x}{:02x}{:02x}".format(*colour) for colour in mixed]


def render_svg(chart: Chart) -> str:
    """Return the chart as an SVG element for a page."""
    import matplotlib

    # The salt keeps the ids of several drawings on one page apart.
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": chart.name, "font.family": "sans-serif"}
    with matplotlib.rc_context(style):
        out = io.StringIO()
        figure = _draw(chart, INK, FAINT)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return inline_svg(out.getvalue())


def render_png(chart: Chart) -> bytes:
    """Return the chart as a PNG file on white, with its caption above."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = _draw(chart, "#1d2129", "#dfe3e8")
    FigureCanvasAgg(figure)
    figure.suptitle(escape_dollars(chart.caption), fontsize=9, color="#1d2129", x=0.01, ha="left")
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=160, facecolor="white", metadata={"Software": None})
    return out.getvalue()


def _draw(chart: Chart, ink: str, faint: str) -> "Figure":
    from matplotlib.figure import Figure

    size = (7.6, 5.2) if chart.named_points else (5.2, 3.4)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    free = cycle(
        (colour, more) for more in ({}, REUSED_COLOUR) for colour in COLOURS + MORE_COLOURS
    )
    for line in chart.lines:
        colour, more = (line.colour, {}) if line.colour else next(free)
        style = STYLES[line.style] | more
        axes.plot(line.xs, line.ys, color=colour, label=escape_dollars(line.label), **style)
    if chart.log_x:
        axes.set_xscale("log")
        _set_ticks(
            axes.xaxis,
            [x for line in chart.lines for x in line.xs],
            most=0 if chart.named_points else 8,
        )
    elif all(float(x).is_integer() for line in chart.lines for x in line.xs):
        axes.locator_params(axis="x", integer=True)
    if chart.log_y:
        axes.set_yscale("log")
        _set_ticks(axes.yaxis, chart.y_range or [y for line in chart.lines for y in line.ys])
    if chart.y_range:
        axes.set_ylim(*chart.y_range)
    axes.set_xlabel(escape_dollars(chart.x), fontsize=9, color=ink)
    axes.set_ylabel(escape_dollars(chart.y), fontsize=9, color=ink)
    style_axes(axes, ink, faint)
    if chart.named_points:
        _name_points(axes, chart.lines, ink)
    elif len(chart.lines) > LEGEND_INSIDE:
        figure.legend(fontsize=6.5, frameon=False, labelcolor=ink, loc="outside right center")
    elif any(line.label for line in chart.lines):
        axes.legend(fontsize=7.5, frameon=False, labelcolor=ink)
    return figure


def _name_points(axes: "Axes", lines: Sequence[Line], ink: str) -> None:
    """Write each line's label beside its last point, moved up or down where labels would meet."""
    axes.margins(x=0.12, y=0.08)
    left, right = axes.get_xlim()
    places = axes.transData.transform([(line.xs[-1], line.ys[-1]) for line in lines])
    middle = axes.transAxes.transform((0.6, 0))[0]
    taken: list[tuple[float, float, float]] = []
    axes.set_xlim(left, right)
    for (x, y), line in sorted(zip(places, lines, strict=True), key=lambda pair: pair[0][1]):
        # A label right of the middle stands left of its point, so that it stays inside.
        width = LETTER * len(line.label)
        start, end = (x - width, x) if x > middle else (x, x + width)
        low = y
        for begin, stop, height in taken:
            if begin < end and start < stop and abs(low - height) < LABEL:
                low = height + LABEL
        taken.append((start, end, low))
        axes.annotate(
            escape_dollars(line.label),
            (line.xs[-1], line.ys[-1]),
            ((-5 if x > middle else 5), (low - y) * 72 / axes.figure.dpi - 2.5),
            textcoords="offset points",
            ha="right" if x > middle else "left",
            fontsize=7.5,
            color=ink,
        )


def _set_ticks(axis: "Axis", values: Sequence[float], most: int = 0) -> None:
    """Choose the ticks of a logarithmic axis.

    Up to `most` different values get a tick each. More values get ticks at powers of ten, and at
    2 and 5 times these if the values span less than a factor of 200. Numbers that would be long
    are written as powers of ten.
    """
    from matplotlib.ticker import (
        FixedLocator,
        LogFormatterSciNotation,
        LogLocator,
        StrMethodFormatter,
    )

    positive = [v for v in values if v > 0]
    low, high = min(positive), max(positive)
    if len(set(positive)) <= most:
        axis.set_major_locator(FixedLocator(sorted(set(positive))))
    else:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 200 * low else (1.0,)))
    plain = low >= 0.01 and high < 10_000
    axis.set_major_formatter(StrMethodFormatter("{x:g}") if plain else LogFormatterSciNotation())
