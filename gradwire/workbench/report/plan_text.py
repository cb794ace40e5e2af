"""Show a plan as a table in the terminal."""

from collections.abc import Iterable

from rich.table import Table

from gradwire.plan.accuracy import allows_topk, is_recommendable
from gradwire.plan.planner import ExchangePlan
from gradwire.plan.predict import Prediction
from gradwire.plan.show import show_bytes, show_number
from gradwire.plan.ways import preference

COLUMNS = (
    "way", "density", "travels as", "step", "computing", "own work", "network", "hidden",
    "sent per step", "memory",
)  # fmt: skip
LEFT = COLUMNS[:3]
"""Columns of words."""
WIDTH = 136
"""Columns of text that the table takes."""
_LONG = 10.0
"""The seconds of the recommended step from which on times are shown in seconds."""


def shown_predictions(plan: ExchangePlan, everything: bool = False) -> list[Prediction]:
    """Return the fastest prediction of each of PyTorch's ways, and of what may be recommended.

    The recommended prediction replaces the fastest of its kind. Where top-k must not be used, its
    fastest exchange alone is shown. With `everything`, return all.
    """
    if everything:
        return plan.predictions
    chosen = plan.recommendation.prediction
    best = {_kind(chosen): chosen}
    # Nothing is left out of what was asked for by name.
    is_open = any(p.way.method == "topk" and not p.way.recipe for p in plan.predictions)
    refused = [p for p in plan.predictions if is_refused(plan, p) and _is_usual(p, plan)]
    hidden = refused[1:] if is_open else []
    for p in plan.predictions:
        if p not in hidden and (not is_open or _is_usual(p, plan)):
            best.setdefault(_kind(p), p)
    return sorted(best.values(), key=lambda p: p.seconds)


def _is_usual(p: Prediction, plan: ExchangePlan) -> bool:
    """Return True for PyTorch's ways, recipes for such a network, and top-k by good exchanges."""
    way = p.way
    if way.recipe:
        return is_recommendable(way, plan.load)
    return not way.exchange or (way.method == "topk" and preference(way) > 0)


def is_refused(plan: ExchangePlan, p: Prediction) -> bool:
    """Return True for sparse gradients in front of an optimiser that they ruin."""
    return not (allows_topk(plan.load) or p.way.sends_all or p.way.every > 1 or not p.way.exchange)


def way_label(plan: ExchangePlan, p: Prediction) -> str:
    """Return the name of a way, and the optimiser that it must not stand in front of."""
    warning = f", not with {plan.load.optimizer_name}" if is_refused(plan, p) else ""
    return p.way.label + warning


def _kind(p: Prediction) -> str:
    """Return the way for recipes, topk and dense, else the method: one of a kind is shown."""
    return p.way.name if p.way.recipe or p.way.method in ("topk", "dense") else p.way.method


def left_out(plan: ExchangePlan, everything: bool = False) -> str:
    """Return a sentence on the ways that are not shown; "" if all are."""
    shown = {_kind(p) for p in shown_predictions(plan, everything)}
    more = {_kind(p) for p in plan.predictions} - shown
    return f"{len(more)} more ways, slower or less accurate: --all shows them" if more else ""


def time_unit(predictions: Iterable[Prediction]) -> tuple[float, str]:
    """Return the unit of all times in a table: milliseconds, or seconds for long steps."""
    return (1.0, "s") if min(p.seconds for p in predictions) >= _LONG / 10 else (1e-3, "ms")


def plan_table(plan: ExchangePlan, everything: bool = False) -> Table:
    """Return a table with a line per way; the recommended way stands out."""
    shown = shown_predictions(plan, everything)
    unit = time_unit(shown)
    title = f"{describe(plan)}: {UNIT_NAMES[unit[1]]} per step"
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    for column in COLUMNS:
        table.add_column(column, no_wrap=True, justify="left" if column in LEFT else "right")
    for p in shown:
        style = "bold green" if p is plan.recommendation.prediction else ""
        table.add_row(*prediction_cells(plan, p, unit), style=style)
    return table


UNIT_NAMES = {"s": "seconds", "ms": "milliseconds"}


def describe(plan: ExchangePlan) -> str:
    """Return the question in words: the model, the workers and the GPU."""
    network = plan.network
    count = f"{network.workers} worker{'s' if network.workers > 1 else ''}"
    if network.local > 1:
        count += f" in {network.nodes} node{'s' if network.nodes > 1 else ''}"
    return f"{plan.load.name}, {count}, {plan.device.name}"


def show_density(p: Prediction) -> str:
    """Return the share of the entries that are sent; a dash for PowerSGD, which has no share."""
    if not p.way.sends_all and not p.way.exchange:
        return "-"
    return "all" if p.way.sends_all else f"{100 * p.way.density:.3g} %"


def prediction_cells(plan: ExchangePlan, p: Prediction, unit: tuple[float, str]) -> list[str]:
    """Return the texts of one line, as COLUMNS says."""
    work = p.compress + p.encode + p.decode
    times = (p.seconds, p.compute, work, p.exchange, p.hidden)
    cells = [show_number(max(0.0, seconds) / unit[0]) for seconds in times]
    memory = f"{plan.memory(p):.0f} B" if plan.memory(p) else "0"
    return [
        way_label(plan, p), show_density(p), p.way.encoding_name, *cells,
        show_bytes(p.bytes) if p.bytes else "0", memory,
    ]  # fmt: skip
