"""The page of the accuracy study: pairs of runs, and what they sent."""

import math
from collections.abc import Sequence
from statistics import mean, stdev

from gradwire.workbench.report.chart import GREY, Chart, Line
from gradwire.workbench.report.outcome import size
from gradwire.workbench.study.study import Page, Row, Table, listed

MOST, LOSS, LIMIT, PAIRS = 0.2, 0.1, 0.3, 8
"""The target: per cent of the entries, points lost on average and at the upper limit, seeds."""

STUDENT = (
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771,
    1.761, 1.753,
)  # fmt: skip
"""The 95 % quantile of Student's t with 1, 2, ... degrees of freedom: the upper end of an interval
that holds the mean in 90 of 100 cases. Beyond the table its last number is on the safe side."""

Runs = dict[str, dict[int, list[Row]]]
"""Recipe, seed, and the rows of that run."""


def page(rows: Sequence[Row]) -> Page:
    """Who keeps dense accuracy, and for how much."""
    found: dict[tuple[str, int], Runs] = {}
    for row in sorted(rows, key=_place):
        runs = found.setdefault((row["model"], row["epochs"]), {})
        runs.setdefault(row["recipe"], {}).setdefault(row["seed"], []).append(row)
    says = " ".join(_says(epochs, runs) for (_, epochs), runs in found.items())
    tables = [_table(model, epochs, runs) for (model, epochs), runs in found.items()]
    charts = [
        chart(model, epochs, runs) for (model, epochs), runs in found.items() for chart in CHARTS
    ]
    return Page(says, tables, charts)


def _place(row: Row) -> tuple[bool, str, int, int]:
    """Rows come in the order in which processes are ready."""
    return row["recipe"] != "dense", row["recipe"], row["seed"], row["epoch"]


def losses(runs: Runs, name: str, against: str = "dense") -> list[float]:
    """Points that the last score is below the other's, for every seed that both have."""
    other, own = runs.get(against, {}), runs[name]
    return [
        100 * (other[seed][-1]["score"] - own[seed][-1]["score"]) for seed in own if seed in other
    ]


def tuned(runs: Runs) -> str:
    """The best of dense with another learning rate and decay, as recipes have them; "" without.

    What these gain is not a recipe's. Of those with the most seeds: one may be lucky in one.
    """
    others = [name for name in runs if name.startswith("dense-")]
    most = max((len(runs[name]) for name in others), default=0)
    others = [name for name in others if len(runs[name]) == most]
    return max(others, key=lambda n: mean(r["score"] for r in _last(runs, n)), default="")


def bases(runs: Runs) -> list[str]:
    """What recipes are compared with: dense, and dense tuned, as far as they are there."""
    found = [name for name in ("dense", tuned(runs)) if name in runs]
    return found or ["dense"]


def upper(lost: Sequence[float]) -> float:
    """The upper end of the 90 % interval of the mean, by Student's t."""
    if len(lost) < 2:
        return math.inf
    factor = STUDENT[min(len(lost) - 1, len(STUDENT)) - 1]
    return mean(lost) + factor * stdev(lost) / math.sqrt(len(lost))


def _last(runs: Runs, name: str) -> list[Row]:
    return [rows[-1] for rows in runs[name].values()]


def _entries(runs: Runs, name: str) -> float:
    """Per cent of all entries that a worker chose."""
    return 100 * mean(r["entries"] / (r["d"] * r["steps"]) for r in _last(runs, name))


def _bytes(runs: Runs, name: str) -> float:
    """Per cent of the bytes of an all-reduce at every step."""
    return 100 * mean(r["bytes"] / r["dense"] for r in _last(runs, name))


def _says(epochs: int, runs: Runs) -> str:
    base, *others = bases(runs)
    pairs = {n: lost for n in runs if n != base and (lost := losses(runs, n, base))}
    few = {n: lost for n, lost in pairs.items() if _entries(runs, n) <= MOST}
    if not few:
        return f"{epochs} epochs: no pair of runs within {MOST:g} % yet."
    good = [
        n
        for n, lost in few.items()
        if mean(lost) < LOSS and upper(lost) < LIMIT and len(lost) >= PAIRS
    ]
    best = min(few, key=lambda n: mean(few[n]))
    says = (
        f"{epochs} epochs: within {MOST:g} % of the entries, {best} comes closest to {base} "
        f"({-mean(few[best]):+.2f} points). The target, less than {LOSS:g} points lost on average "
        f"and {LIMIT:g} at the upper limit over {PAIRS} seeds, is reached by {listed(good)}."
    )
    for other in others:
        if lost := losses(runs, best, other):
            says += f" Against {other} {best} ends at {_points(lost)}"
            says += f", at most {upper(lost):.2f} lost." if len(lost) > 1 else "."
    return says


def _points(lost: Sequence[float]) -> str:
    """The mean difference with its standard deviation, as far as there are pairs."""
    spread = f" +- {stdev(lost):.2f}" if len(lost) > 1 else ""
    return f"{-mean(lost):+.2f}{spread}" if lost else ""


def _table(model: str, epochs: int, runs: Runs) -> Table:
    body = []
    for name in runs:
        last = _last(runs, name)
        scores = [100 * row["score"] for row in last]
        line = [
            name,
            f"{mean(scores):.2f}",
            f"{min(scores):.2f} to {max(scores):.2f}",
            str(len(last)),
        ]
        for base in bases(runs):
            lost = losses(runs, name, base) if name != base else []
            line += [_points(lost), f"{upper(lost):.2f}" if len(lost) > 1 else ""]
        line += [f"{_entries(runs, name):.3g} %", f"{_bytes(runs, name):.3g} %"]
        body.append([*line, size(mean(row["bytes"] for row in last))])
    columns = ["", "test accuracy, %", "from to", "seeds"]
    for base in bases(runs):
        columns += [f"points against {base}", f"most lost against {base}"]
    columns += ["entries", "bytes of dense", "bytes"]
    some = _last(runs, next(iter(runs)))[0]
    note = (
        f"{epochs} epochs, d = {some['d']:,}; all residuals take {size(some['residual_bytes'])}. "
        f"Activations of dense: {some.get('activations', 'fp32')}. "
        "Pairs share seed and order of examples. Most lost: the upper end of the 90 % "
        "interval of the mean difference (t). Entries: what a worker chose, over d and all steps "
        "of dense (with the union its values go wherever any worker chose); bytes: what left all "
        "workers, over that of an all-reduce at every one of them. twice: trained for twice as "
        "many epochs as dense."
    )
    return Table(f"{model}, {epochs} epochs", columns, body, note)


def _on_the_way(model: str, epochs: int, runs: Runs) -> Chart:
    lines = []
    for name, seeds in runs.items():
        steps = [step for step in zip(*seeds.values(), strict=False) if step[0]["bytes"]]
        xs = [step[0]["bytes"] / 1e6 for step in steps]
        ys = [100 * mean(row["score"] for row in step) for step in steps]
        style = "dashes" if name.startswith("dense") else "line"
        lines.append(Line(name, xs, ys, style, GREY if name == "dense" else ""))
    caption = f"{model}, {epochs} epochs: accuracy against what was sent so far"
    label = "MB sent by all workers"
    return Chart(f"{model}-{epochs}", caption, label, "test accuracy, %", lines, log_x=True)


def _at_the_end(model: str, epochs: int, runs: Runs) -> Chart:
    lines = []
    for name in runs:
        ys = [100 * row["score"] for row in _last(runs, name)]
        xs = [float(f"{_bytes(runs, name):.3g}")] * len(ys)
        lines.append(Line(name, xs, ys, "points", GREY if name == "dense" else ""))
    caption = f"{model}, {epochs} epochs: where every seed ends, against all that was sent"
    label = "bytes, % of an all-reduce at every step"
    return Chart(f"{model}-{epochs}-ends", caption, label, "test accuracy, %", lines, log_x=True)


CHARTS = (_at_the_end, _on_the_way)
