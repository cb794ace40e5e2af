"""Write a plan as one HTML file.

The page has the answer, a bar per way, the step time against the link rate, and the table.
"""

import os
from html import escape
from pathlib import Path

from gradwire.errors import ConfigError
from gradwire.plan.network import show_link
from gradwire.plan.planner import ExchangePlan
from gradwire.plan.predict import Prediction
from gradwire.plan.show import show_bytes, show_count, show_seconds
from gradwire.workbench.report.page import html_document, html_table
from gradwire.workbench.report.plan_chart import rate_caption, render_rates
from gradwire.workbench.report.plan_text import (
    COLUMNS,
    UNIT_NAMES,
    describe,
    left_out,
    prediction_cells,
    show_density,
    shown_predictions,
    time_unit,
    way_label,
)

PARTS = (
    ("computing", "#8a8f98"),
    ("own work: choosing, encoding, decoding", "#2f6fde"),
    ("network, not hidden", "#d9722e"),
)
ROOM = 1.6
"""The longest bar, as a multiple of the fastest uncompressed step; longer ones are cut."""
BARS = """
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: 6px 12px;
        align-items: center; font-variant-numeric: tabular-nums; font-size: 14px; }
.bars .bar { display: flex; height: 16px; background: var(--band); }
.bars .bar i { display: block; height: 100%; }
.bars .best { font-weight: 650; }
.bars .time { text-align: right; white-space: nowrap; }
.legend i { height: 10px; width: 10px; }
.numbers { font-size: 13px; }
.numbers td + td, .numbers th + th { padding-left: 8px; }
@media (max-width: 600px) {
  .bars { grid-template-columns: 1fr max-content; grid-auto-flow: dense; gap: 2px 12px; }
  .bars .name { grid-column: 1; } .bars .time { grid-column: 2; }
  .bars .bar { grid-column: 1 / 3; margin-bottom: 6px; } }
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
    about = f"{describe(plan)}, {show_link(network.rate)}"
    count = show_count(load.entries)
    more = "" if count in load.name else f", {count} parameters"
    legend = "".join(f'<li><i style="background:{c}"></i>{escape(n)}</li>' for n, c in PARTS)
    sentences = [*plan.notes, *filter(None, [left_out(plan)])]
    notes = "".join(f'<p class="note">{escape(_sentence(note))}</p>' for note in sentences)
    code = f"<pre>{escape(chr(10).join(choice.code))}</pre>\n" if choice.code else ""
    shown = shown_predictions(plan)
    unit = time_unit(shown)
    table = html_table(COLUMNS, (prediction_cells(plan, p, unit) for p in shown))
    caption = rate_caption(plan)
    body = (
        f'<p class="kicker">gradwire plan &middot; {escape(about + more)}</p>\n'
        f"<h1>{escape(headline(plan))}</h1>\n<p>{escape(_sentence(choice.reason))}</p>\n{code}"
        f'<h2>Where the time of a step goes</h2>\n<ul class="legend">{legend}</ul>\n'
        f"{_bars(plan)}\n<h2>{escape(caption)}</h2>\n"
        f'<figure role="img" aria-label="{escape(caption)}">{render_rates(plan)}</figure>\n'
        f"<h2>{UNIT_NAMES[unit[1]].capitalize()} per step</h2>\n{table}\n{notes}"
    )
    return html_document(about, body, BARS)


def headline(plan: ExchangePlan) -> str:
    """Return the answer in a sentence."""
    choice = plan.recommendation
    dense = show_seconds(choice.dense.seconds)
    if not choice.compresses:
        return f"Do not compress: {choice.dense.way.label} takes {dense} per step"
    name = f"recipe {choice.recipe}" if choice.recipe else choice.prediction.way.name
    ours = show_seconds(choice.prediction.seconds)
    return f"Use {name}: {ours} per step instead of {dense}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _bars(plan: ExchangePlan) -> str:
    rows = shown_predictions(plan)
    # A way that takes far longer than dense would leave no room for the others.
    choice = plan.recommendation
    longest = min(ROOM * choice.dense.seconds, max(p.seconds for p in rows))
    longest = max(longest, choice.prediction.seconds)
    return f'<div class="bars">{"".join(_bar(p, longest, plan) for p in rows)}</div>'


def _bar(p: Prediction, longest: float, plan: ExchangePlan) -> str:
    best = " best" if p is plan.recommendation.prediction else ""
    work = p.compress + p.encode + p.decode
    spent = [p.compute, work, max(0.0, p.seconds - p.compute - work)]
    pieces, room = [], longest
    for (name, colour), seconds in zip(PARTS, spent, strict=True):
        width = min(seconds, room)
        room -= width
        title = f"{name}: {show_seconds(seconds)}"
        pieces.append(
            f'<i style="width:{100 * width / longest:.2f}%;background:{colour}" '
            f'title="{escape(title)}"></i>'
        )
    cut = " &rarr;" if p.seconds > 1.001 * longest else ""
    density = "" if p.way.density == 1 or p.way.recipe else f", {show_density(p)}"
    refused = way_label(plan, p).removeprefix(p.way.label)
    name = p.way.label + density + refused
    title = f"{show_bytes(p.bytes)} sent per step and worker"
    return (
        f'<span class="name{best}" title="{escape(title)}">{escape(name)}</span>'
        f'<span class="bar">{"".join(pieces)}</span>'
        f'<span class="time{best}">{escape(show_seconds(p.seconds))}{cut}</span>'
    )
