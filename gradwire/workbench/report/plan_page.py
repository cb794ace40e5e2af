"""A plan as one HTML file: a stacked bar a method, step time against link rate, the table."""

import os
from html import escape
from pathlib import Path

from gradwire.errors import ConfigError
from gradwire.plan.network import GOODPUT, show_link
from gradwire.plan.planner import ExchangePlan
from gradwire.plan.predict import Prediction
from gradwire.workbench.report.chart import GREY, Chart, Line, svg
from gradwire.workbench.report.page import STYLE
from gradwire.workbench.report.plan_text import COLUMNS, MORE, cells, shown

PARTS = (
    ("compute", "#8a8f98"),
    ("compress", "#2f6fde"),
    ("encode", "#a855b5"),
    ("decode", "#2c9a6b"),
    ("exchange, not hidden", "#d9722e"),
)
RATES = [10 ** (i / 4) for i in range(28, 46)]
"""Bits a second, 10 Mbit/s to 180 Gbit/s."""
LINES = 6
BARS = """
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: 6px 12px;
        align-items: center; font-variant-numeric: tabular-nums; }
.bars .bar { display: flex; height: 16px; background: var(--band); }
.bars .bar i { display: block; height: 100%; }
.bars .best { font-weight: 650; }
.legend i { height: 10px; width: 10px; }
"""


def write_page(found: ExchangePlan, file: Path) -> Path:
    """Writes the page, without scripts or outside resources, and returns its path."""
    check_name(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_name(file.name + ".tmp")
        scratch.write_text(page(found), encoding="utf-8")
        os.replace(scratch, file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error
    return file


def check_name(file: Path) -> None:
    """Refuses what a browser would not open as a page."""
    if file.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--html takes a name that ends in .html, got {str(file)!r}")


def page(found: ExchangePlan) -> str:
    """The whole document."""
    load, network, choice = found.load, found.network, found.recommendation
    about = (
        f"{load.name}, {load.entries:,} parameters, {network.workers} workers in {network.nodes} "
        f"nodes, {show_link(network.rate)}, {found.device.name}"
    )
    verdict = f"Use {choice.prediction.way.name}" if choice.compresses else "Do not compress"
    legend = "".join(f'<li><i style="background:{c}"></i>{escape(n)}</li>' for n, c in PARTS)
    notes = "".join(f'<p class="note">{escape(note)}.</p>' for note in found.notes)
    chart = rates(found)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(about)}</title>\n<style>{STYLE}{BARS}</style>\n</head>\n<body><main>\n"
        f'<p class="kicker">gradwire plan &middot; {escape(about)}</p>\n'
        f"<h1>{escape(verdict)}</h1>\n<p>{escape(choice.reason)}</p>\n"
        f'<h2>Seconds a step</h2>\n<ul class="legend">{legend}</ul>\n{_bars(found)}\n'
        f"<h2>{escape(chart.caption)}</h2>\n"
        f'<figure role="img" aria-label="{escape(chart.caption)}">{svg(chart)}</figure>\n'
        f"<h2>Milliseconds a step</h2>\n{_table(found)}\n{notes}\n</main></body>\n</html>\n"
    )


def rates(found: ExchangePlan) -> Chart:
    """Step time against link rate: dense, topk by its fastest exchanges, and computing alone."""
    ways = shown(found)
    dense = [p for p in ways if p.way.method == "dense"]
    chosen = found.recommendation.prediction
    rest = [p for p in ways if p.way.method == "topk" and p is not chosen]
    first = [] if chosen in dense else [chosen]
    xs = [rate / 1e6 for rate in RATES]
    lines = [
        Line(_label(p), xs, [found.seconds_at(p, GOODPUT * rate / 8) for rate in RATES])
        for p in [*first, *dense, *rest][:LINES]
    ]
    lines.append(Line("computing alone", xs, [found.load.seconds] * len(xs), "dashes", GREY))
    caption = "Step time against link rate"
    return Chart("rates", caption, "link, Mbit/s", "seconds a step", lines, log_x=True, log_y=True)


def _label(p: Prediction) -> str:
    density = "" if p.way.density == 1 else f" {p.way.density:g} {p.way.encoding_name}"
    return p.way.name + density


def _bars(found: ExchangePlan) -> str:
    rows = shown(found)
    # A way that takes far longer than dense would leave no room for the others.
    longest = max(p.seconds for p in rows if p.way.method == "dense")
    longest = max(longest, found.recommendation.prediction.seconds)
    return f'<div class="bars">{"".join(_bar(p, longest, found) for p in rows)}</div>'


def _bar(p: Prediction, longest: float, found: ExchangePlan) -> str:
    best = ' class="best"' if p is found.recommendation.prediction else ""
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


def _table(found: ExchangePlan) -> str:
    head = "".join(f"<th>{escape(c)}</th>" for c in (*COLUMNS, *MORE))
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells(p))}</tr>" for p in shown(found)
    )
    table = f'<table class="numbers"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'
