"""Draw the curves of training runs as SVG.

The SVG takes the colour of its text and grid from the page that it stands in.
"""

import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gradwire.workbench.report.outcome import format_bytes
from gradwire.workbench.report.read import Run
from gradwire.workbench.train.task import TASKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

# Matplotlib needs real colours. `inline_svg` replaces these two by those of the page.
INK, FAINT = "#010203", "#040506"
COLOURS = ("#2f6fde", "#d9722e", "#2c9a6b", "#a855b5", "#c2a01e")
DENSE = "#8a8f98"

NAMES = {"step": "step", "loss": "training loss"}
NAMES |= {task.column: task.measure for task in TASKS.values()}
NAMES["bytes_sent"] = "bytes sent by all workers"

FORMATS: dict[str, Callable[[float], str]] = {
    "step": lambda v: f"{v:,.0f}",
    "loss": lambda v: f"{v:g}",
    "test_accuracy": lambda v: f"{100 * v:g} %",
    "test_letter_error": lambda v: f"{100 * v:g} %",
    "test_perplexity": lambda v: f"{v:g}",
    "test_loss": lambda v: f"{v:g}",
    "bytes_sent": format_bytes,
}


def run_colours(runs: Sequence[Run]) -> list[str]:
    """Return a colour per run; the first dense run is grey."""
    free = iter(COLOURS * len(runs))
    grey = next((run for run in runs if run.dense), None)
    return [DENSE if run is grey else next(free) for run in runs]


def run_charts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return the caption and the SVG of each chart.

    The two charts of bytes are left out if nothing was sent, as with a single worker.
    """
    score = runs[0].task.column
    pairs = [("step", "loss"), ("step", score)]
    if any(run.last("bytes_sent") for run in runs):
        pairs += [("step", "bytes_sent"), ("bytes_sent", score)]
    return [(_caption(runs, x, y), _chart(runs, x, y)) for x, y in pairs]


def _caption(runs: Sequence[Run], x: str, y: str) -> str:
    name = NAMES[y][0].upper() + NAMES[y][1:]
    scale = ", logarithmic" if any(_logarithmic(runs, column) for column in (x, y)) else ""
    return f"{name} by {NAMES[x]}{scale}"


def _logarithmic(runs: Sequence[Run], column: str) -> bool:
    """Return True for bytes, and for a loss that has fallen by more than a factor of 20.

    On a linear axis the end of such a loss would be hard to see.
    """
    return column == "bytes_sent" or (
        column in ("loss", "test_perplexity") and _decades(runs, column) > 1.3
    )


def _decades(runs: Sequence[Run], column: str) -> float:
    """Return the number of powers of ten between the smallest and the largest value."""
    values = [v for run in runs for v in run.series(column)[1] if 0 < v < math.inf]
    return math.log10(max(values) / min(values)) if values else 0.0


def _chart(runs: Sequence[Run], x: str, y: str) -> str:
    """Draw column `y` over column `x`, with a line per run."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # Text stays text; the salt keeps the ids of several drawings on one page apart.
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": f"{x}-{y}", "font.family": "sans-serif"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(4.6, 2.9), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for run, colour in zip(runs, run_colours(runs), strict=True):
            # A line through one or two points is hard to see without markers.
            rows = [r for r in run.records if r.get(x) is not None and r.get(y) is not None]
            marker = "o" if len(rows) < 3 else None
            points = [r[x] for r in rows], [r[y] for r in rows]
            axes.plot(*points, color=colour, linewidth=1.6, marker=marker)
        _scale(axes.xaxis, axes.set_xscale, runs, x)
        _scale(axes.yaxis, axes.set_yscale, runs, y)
        style_axes(axes, INK, FAINT)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return inline_svg(out.getvalue())


def _scale(
    axis: "Axis", set_scale: Callable[[str], None], runs: Sequence[Run], column: str
) -> None:
    """Set the scale of an axis, its ticks, and the format of its numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    if _logarithmic(runs, column):
        set_scale("log")
        between = (1.0, 2.0, 5.0) if _decades(runs, column) < 2 else (1.0,)
        axis.set_major_locator(LogLocator(subs=between))
    else:
        axis.set_major_locator(MaxNLocator(nbins=6, integer=column == "step"))
    axis.set_major_formatter(FuncFormatter(lambda value, _: FORMATS[column](value)))


def style_axes(axes: "Axes", ink: str, faint: str) -> None:
    """Leave only a light grid, without frame or tick marks."""
    axes.grid(True, color=faint, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(which="both", colors=ink, length=0, labelsize=9)
    axes.minorticks_off()


def escape_dollars(text: str) -> str:
    """Escape $ for matplotlib, which would set the text between two of them as mathematics."""
    return text.replace("$", r"\$")


def inline_svg(svg: str) -> str:
    """Return only the `<svg>` element, with the colours of the page for ink and grid."""
    svg = svg[svg.index("<svg") :]
    return svg.replace(INK, "currentColor").replace(FAINT, "var(--line)")
