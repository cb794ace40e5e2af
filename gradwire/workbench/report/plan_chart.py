"""Draw the step time of a plan against the link rate, with a mark at the link that was asked for.

Lines are labelled at their left ends. A line that would hide behind another one is left out.
"""

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradwire.plan.network import GOODPUT, show_link
from gradwire.plan.planner import ExchangePlan
from gradwire.plan.predict import Prediction
from gradwire.plan.show import show_number, show_seconds
from gradwire.workbench.report.curves import FAINT, INK, inline_svg, style_axes
from gradwire.workbench.report.plan_text import shown_predictions, way_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DECADES = 1.7
"""Powers of ten to each side of the link that was asked for."""
POINTS = 25
CHOSEN, OUTSIDE, OTHERS = "#2f6fde", ("#d9722e", "#a855b5", "#c2a01e"), ("#2c9a6b", "#17a2b8")
"""Colours of the recommended way, of PyTorch's ways, and of gradwire's others."""
MOST_LINES = 6
ALIKE = 1.04
"""Two lines that are everywhere within this factor look like one."""
APART = 0.055
"""The least distance of two labels, in heights of the chart."""


@dataclass(frozen=True)
class Curve:
    """Line of the chart, in seconds per step at each rate."""

    label: str
    colour: str
    seconds: Sequence[float]
    is_chosen: bool = False


def rate_caption(plan: ExchangePlan) -> str:
    """Return the question that the chart answers."""
    return f"How long is a step on other links? Yours has {show_link(plan.network.rate)}"


def link_rates(plan: ExchangePlan) -> list[float]:
    """Return rates around the link that was asked for, in bits per second."""
    middle = math.log10(8 * plan.network.rate / GOODPUT)
    steps = [DECADES * (2 * i / (POINTS - 1) - 1) for i in range(POINTS)]
    return [10 ** (middle + step) for step in steps]


def rate_curves(plan: ExchangePlan, rates: Sequence[float]) -> list[Curve]:
    """Return the recommended way, dense, and what differs from these, the fastest first."""
    chosen = plan.recommendation.prediction
    curves: list[Curve] = []
    ours, theirs = iter(OTHERS), iter(OUTSIDE)
    for p in _in_order(plan):
        seconds = [plan.seconds_at(p, GOODPUT * rate / 8) for rate in rates]
        if len(curves) < MOST_LINES and not any(_look_alike(seconds, c.seconds) for c in curves):
            colour = CHOSEN if p is chosen else next(theirs if not p.way.exchange else ours, "")
            if colour:
                curves.append(Curve(way_label(plan, p), colour, seconds, p is chosen))
    return curves


def _in_order(plan: ExchangePlan) -> Iterator[Prediction]:
    """Yield the recommended way, what people have, recipes, and the fastest others."""
    shown = shown_predictions(plan)
    chosen, dense = plan.recommendation.prediction, plan.recommendation.dense
    first = [p for p in shown if p.way.method in ("ddp", "bf16-hook")]
    recipes = [p for p in shown if p.way.recipe]
    rest = [p for p in shown if p.way.method == "topk" or not p.way.exchange]
    yield from dict.fromkeys([chosen, dense, *first, *recipes, *rest])


def _look_alike(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(max(x / y, y / x) < ALIKE for x, y in zip(a, b, strict=True))


def render_rates(plan: ExchangePlan) -> str:
    """Return the chart as an SVG element for a page."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "rates", "font.family": "sans-serif"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9.2, 4.2))
        FigureCanvasSVG(figure)
        axes = figure.add_axes((0.275, 0.12, 0.65, 0.82))
        _draw(axes, plan)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return inline_svg(out.getvalue())


def _draw(axes: "Axes", plan: ExchangePlan) -> None:
    rates = link_rates(plan)
    xs = [rate / 1e9 for rate in rates]
    curves = rate_curves(plan, rates)
    alone = plan.load.seconds
    for curve in curves:
        axes.plot(xs, curve.seconds, color=curve.colour, linewidth=2.4 if curve.is_chosen else 1.5)
    axes.plot(xs, [alone] * len(xs), color="#8a8f98", linewidth=1.2, linestyle=(0, (5, 3)))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(xs[0], xs[-1])
    low = min(alone, *(min(c.seconds) for c in curves)) or min(min(c.seconds) for c in curves) / 2
    high = max(max(c.seconds) for c in curves)
    axes.set_ylim(low / 1.25, high * 1.25)
    style_axes(axes, INK, FAINT)
    _write_ticks(axes, xs)
    middle = 8 * plan.network.rate / GOODPUT / 1e9
    axes.axvline(middle, color=INK, linewidth=1.0, linestyle=(0, (2, 2)))
    axes.text(
        middle * 1.06, high * 1.12, f"your link, {show_link(plan.network.rate)}",
        fontsize=9, color=INK, va="top",
    )  # fmt: skip
    axes.set_xlabel("link of a node, Gbit/s", fontsize=9, color=INK)
    starts = [(c.seconds[0], c.label, c.colour) for c in curves]
    axes.yaxis.tick_right()
    _label_starts(axes, [*starts, (alone, "computing alone", "#8a8f98")])


def _write_ticks(axes: "Axes", xs: Sequence[float]) -> None:
    """Label both axes at 1, 2 and 5 times powers of ten, or at these powers alone."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    low, high = axes.get_ylim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0,)))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 300 * low else (1.0,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: show_number(x)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: show_seconds(y).split(" (")[0]))


def _label_starts(axes: "Axes", starts: Sequence[tuple[float, str, str]]) -> None:
    """Write each label at the left end of its line, where lines are far from each other.

    Labels that would meet are moved apart.
    """
    low, high = axes.get_ylim()
    span = math.log(high / low)
    heights = [math.log(max(y, low) / low) / span for y, _, _ in starts]
    order = sorted(range(len(starts)), key=lambda i: heights[i])
    places = spread([heights[i] for i in order], APART)
    for i, place in zip(order, places, strict=True):
        _, label, colour = starts[i]
        axes.annotate(
            label, (0, heights[i]), (-0.035, place), xycoords="axes fraction",
            textcoords="axes fraction", fontsize=9, color=colour, va="center", ha="right",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkA": 0,
                        "shrinkB": 0, "relpos": (1, 0.5)},
        )  # fmt: skip


def spread(heights: Sequence[float], apart: float) -> list[float]:
    """Return heights, in rising order, that are at least `apart`, near the given ones.

    Labels that meet form a block around their mean.
    """
    blocks: list[list[float]] = []
    for height in heights:
        blocks.append([height])
        while len(blocks) > 1 and _start(blocks[-1], apart) < _end(blocks[-2], apart) + apart:
            last = blocks.pop()
            blocks[-1] = [*blocks[-1], *last]
    return [_start(block, apart) + i * apart for block in blocks for i in range(len(block))]


def _start(block: Sequence[float], apart: float) -> float:
    return sum(block) / len(block) - (len(block) - 1) * apart / 2


def _end(block: Sequence[float], apart: float) -> float:
    return _start(block, apart) + (len(block) - 1) * apart
