"""Write a plan as one HTML file.

The page has a stacked bar per way, the step time against the link rate, and the table.
"""

import os
from html import escape
from pathlib import Path

from gradwire.errors import ConfigError
from gradwire.plan.network import GOODPUT, show_link
from gradwire.plan.planner import ExchangePlan
from gradwire.plan.predict import Prediction
from gradwire.workbench.report.chart import GREY, Chart, Line, render_svg
from gradwire.workbench.report.page import html_document, html_table
from gradwire.workbench.report.plan_text import (
    COLUMNS,
    MORE_COLUMNS,
    prediction_cells,
    shown_predictions,
)

PARTS = (
    ("compute", "#8a8f98"),
    ("compress", "#2f6fde"),
    ("encode", "#a855b5"),
    ("decode", "#2c9a6b"),
    ("exchange, not hidden", "#d9722e"),
)
RATES = [10 ** (i / 4) for i in range(28, 46)]
"""Link rates in bits per second: 10 Mbit/s to 180 Gbit/s."""
MOST_LINES = 6
"""Ways that the chart of link rates shows at most."""
BARS = """
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: 6px 12px;
        align-items: center; font-variant-numeric: tabular-nums; }
.bars .bar { display: flex; height: 16px; background: var(--band); }
.bars .bar i { display: block; height: 100%; }
.bars .best { font-weight: 650; }
.legend i { height: 10px; width: 10px; }
"""


def write_plan_page(plan: ExchangePlan, file: Path) -> Path:
    """Write the page, without scripts or outside resources, and return its path."""
    check_html_name(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_name(file.name + ".tmp")
        scratch.write_text(render_plan(plan), encoding="utf-8")
        os.replace(scratch, file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error
    return file


def check_html_name(file: Path) -> None:
    """Raise a ConfigError for a name that a browser would not open as a page."""
    if file.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--html takes a name that ends in .html, got {str(file)!r}")


def render_plan(plan: ExchangePlan) -> str:
    """Return the page of a plan."""
    load, network, choice = plan.load, plan.network, plan.recommendation
    about = (
        f"{load.name}, {load.entries:,} parameters, {network.workers} workers in {network.nodes} "
        f"nodes, {show_link(network.rate)}, {plan.device.name}"
    )
    verdict = f"Use {choice.prediction.way.name}" if choice.compresses else "Do not compress"
    legend = "".join(f'<li><i style="background:{c}"></i>{escape(n)}</li>' for n, c in PARTS)
    notes = "".join(f'<p class="note">{escape(note)}.</p>' for note in plan.notes)
    chart = _rate_chart(plan)
    table = html_table((*COLUMNS, *MORE_COLUMNS), map(prediction_cells, shown_predictions(plan)))
    body = (
        f'<p class="kicker">gradwire plan &middot; {escape(about)}</p>\n'
        f"<h1>{escape(verdict)}</h1>\n<p>{escape(choice.reason)}</p>\n"
        f'<h2>Seconds a step</h2>\n<ul class="legend">{legend}</ul>\n{_bars(plan)}\n'
        f"<h2>{escape(chart.caption)}</h2>\n"
        f'<figure role="img" aria-label="{escape(chart.caption)}">{render_svg(chart)}</figure>\n'
        f"<h2>Milliseconds a step</h2>\n{table}\n{notes}"
    )
    return html_document(about, body, BARS)


def _rate_chart(plan: ExchangePlan) -> Chart:
    """Draw step time against link rate.

    The lines are the recommended way, dense, the fastest exchanges of topk, and computing alone.
    """
    ways = shown_predictions(plan)
    dense = [p for p in ways if p.way.method == "dense"]
    chosen = plan.recommendation.prediction
    topk = [p for p in ways if p.way.method == "topk" and p is not chosen]
    first = [] if chosen in dense else [chosen]
    xs = [rate / 1e6 for rate in RATES]
    lines = [
        Line(_label(p), xs, [plan.seconds_at(p, GOODPUT * rate / 8) for rate in RATES])
        for p in [*first, *dense, *topk][:MOST_LINES]
    ]
    lines.append(Line("computing alone", xs, [plan.load.seconds] * len(xs), "dashes", GREY))
    caption = "Step time against link rate"
    return Chart("rates", caption, "link, Mbit/s", "seconds a step", lines, log_x=True, log_y=True)


def _label(p: Prediction) -> str:
    density = "" if p.way.density == 1 else f" {p.way.density:g} {p.way.encoding_name}"
    return p.way.name + density


def _bars(plan: ExchangePlan) -> str:
    rows = shown_predictions(plan)
    # A way that takes far longer than dense would leave no room for the others.
    longest = max(p.seconds for p in rows if p.way.method == "dense")
    longest = max(longest, plan.recommendation.prediction.seconds)
    return f'<div class="bars">{"".join(_bar(p, longest, plan) for p in rows)}</div>'


def _bar(p: Prediction, longest: float, plan: ExchangePlan) -> str:
    best = ' class="best"' if p is plan.recommendation.prediction else ""
    spent = [p.compute, p.compress, p.encode, p.decode, 0.0]
    spent[-1] = max(0.0, p.seconds - sum(spent))
    pieces, room = [], longest
    for (name, colour), seconds in zip(PARTS, spent, strict=True):
        width = min(seconds, room)
        room -= width
        title = f"{name}: {1e3 * seconds:.4g} ms"
        pieces.append(
            f'<i style="width:{100 * width / longest:.2f}%;background:{colour}" '
            f'title="{escape(title)}"></i>'
        )
    cut = " &rarr;" if p.seconds > 1.001 * longest else ""
    return (
        f'<span{best}>{escape(_label(p))}</span><span class="bar">{"".join(pieces)}</span>'
        f"<span{best}>{1e3 * p.seconds:,.4g} ms{cut}</span>"
    )
