"""A plan as a table in the terminal."""

from rich.table import Table

from gradwire.plan.planner import ExchangePlan
from gradwire.plan.predict import PARTS, Prediction

COLUMNS = ("", "density", "travels as", "step", "compute", "compress", "encode", "exchange")
MORE = ("decode", "hidden", "MB sent", "bundles")
WIDTH = 124


def shown(found: ExchangePlan, everything: bool = False) -> list[Prediction]:
    """The fastest prediction of each method, and of each exchange of topk; the recommended one
    stands for its own."""
    if everything:
        return found.predictions
    chosen = found.recommendation.prediction
    best = {_row(chosen): chosen}
    for p in found.predictions:
        best.setdefault(_row(p), p)
    return sorted(best.values(), key=lambda p: p.seconds)


def _row(p: Prediction) -> str:
    return p.way.name if p.way.method in ("topk", "dense") else p.way.method


def as_table(found: ExchangePlan, everything: bool = False) -> Table:
    """A line a way, in milliseconds; the recommended one is marked."""
    load, network = found.load, found.network
    title = f"{load.name}, {network.workers} workers, {found.device.name}: milliseconds a step"
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    for column in (*COLUMNS, *MORE):
        table.add_column(column, no_wrap=True, justify="left" if column in COLUMNS[:3] else "right")
    for p in shown(found, everything):
        style = "bold green" if p is found.recommendation.prediction else ""
        table.add_row(*cells(p), style=style)
    return table


def cells(p: Prediction) -> list[str]:
    """The columns of one prediction."""
    times = [_ms(getattr(p, part)) for part in ("seconds", *PARTS)]
    sent = f"{p.bytes / 1e6:,.3g}"
    return [p.way.name, f"{p.way.density:g}", p.way.encoding_name, *times, sent, str(p.bundles)]


def _ms(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:,.0f}" if ms >= 1000 else f"{ms:.3g}" if ms >= 0.01 else "0"
