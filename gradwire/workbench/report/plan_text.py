"""Show a plan as a table in the terminal."""

from rich.table import Table

from gradwire.plan.planner import ExchangePlan
from gradwire.plan.predict import PARTS, Prediction

COLUMNS = ("", "density", "travels as", "step", "compute", "compress", "encode", "exchange")
MORE_COLUMNS = ("decode", "hidden", "MB sent", "bundles")
WIDTH = 124
"""Columns of text that the table takes."""


def shown_predictions(plan: ExchangePlan, everything: bool = False) -> list[Prediction]:
    """Return the fastest prediction of each method and, for topk, of each exchange.

    The recommended prediction replaces the fastest of its kind. With `everything`, return all.
    """
    if everything:
        return plan.predictions
    chosen = plan.recommendation.prediction
    best = {_kind(chosen): chosen}
    for p in plan.predictions:
        best.setdefault(_kind(p), p)
    return sorted(best.values(), key=lambda p: p.seconds)


def _kind(p: Prediction) -> str:
    """Return the way for topk and dense, else the method: one prediction of a kind is shown."""
    return p.way.name if p.way.method in ("topk", "dense") else p.way.method


def plan_table(plan: ExchangePlan, everything: bool = False) -> Table:
    """Return a table with a line per way, in milliseconds; the recommended way stands out."""
    load, network = plan.load, plan.network
    title = f"{load.name}, {network.workers} workers, {plan.device.name}: milliseconds a step"
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    for column in (*COLUMNS, *MORE_COLUMNS):
        table.add_column(column, no_wrap=True, justify="left" if column in COLUMNS[:3] else "right")
    for p in shown_predictions(plan, everything):
        style = "bold green" if p is plan.recommendation.prediction else ""
        table.add_row(*prediction_cells(p), style=style)
    return table


def prediction_cells(p: Prediction) -> list[str]:
    """Return the texts of one line: COLUMNS, then MORE_COLUMNS."""
    times = [_format_ms(getattr(p, part)) for part in ("seconds", *PARTS)]
    sent = f"{p.bytes / 1e6:,.3g}"
    return [p.way.name, f"{p.way.density:g}", p.way.encoding_name, *times, sent, str(p.bundles)]


def _format_ms(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:,.0f}" if ms >= 1000 else f"{ms:.3g}" if ms >= 0.01 else "0"
