"""Make the page of the accuracy study: differences of paired runs, and the bytes sent."""

import math
from collections.abc import Sequence
from statistics import mean, stdev

from gradwire.workbench.report.chart import GREY, Chart, Line
from gradwire.workbench.report.outcome import format_bytes
from gradwire.workbench.study.study import (
    Page,
    Runs,
    StudyRow,
    StudyTable,
    group_runs,
    join_names,
)

MOST_ENTRIES, MEAN_LOSS, UPPER_LOSS, PAIRS = 0.2, 0.1, 0.3, 8
"""The target: per cent of entries, points lost on average and at the upper limit, seeds."""

STUDENT = (
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771,
    1.761, 1.753,
)  # fmt: skip
"""The 95 % quantile of Student's t with 1, 2, ... degrees of freedom.

It gives the upper end of an interval that contains the mean in 90 of 100 cases. For more degrees of
freedom the last number is slightly too large, which is the safe side.
"""


def page(rows: Sequence[StudyRow]) -> Page:
    """Name the recipes that keep dense accuracy, with the entries and bytes they send."""
    # Rows come in the order in which processes end.
    tasks = group_runs(sorted(rows, key=_sort_key), lambda row: (row["model"], row["epochs"]))
    summary = " ".join(_summarise(epochs, runs) for (_, epochs), runs in tasks.items())
    tables = [_table(model, epochs, runs) for (model, epochs), runs in tasks.items()]
    charts = [
        chart(model, epochs, runs) for (model, epochs), runs in tasks.items() for chart in CHARTS
    ]
    return Page(summary, tables, charts)


def _sort_key(row: StudyRow) -> tuple[bool, str, int, int]:
    """Put dense first, then sort by recipe, seed and epoch."""
    return row["recipe"] != "dense", row["recipe"], row["seed"], row["epoch"]


def _points_lost(runs: Runs, name: str, base: str = "dense") -> list[float]:
    """Return the points that the last score of `name` is below that of `base`, by common seed."""
    bases = runs.get(base, {})
    return [
        100 * (bases[seed][-1]["score"] - rows[-1]["score"])
        for seed, rows in runs[name].items()
        if seed in bases
    ]


def _best_tuned_dense(runs: Runs) -> str:
    """Return the name of the best dense run with a tuned learning rate and decay, or "".

    Recipes use tuned rates and decays too, and the gain from tuning alone is not theirs.
    """
    tuned = [name for name in runs if name.startswith("dense-")]
    # With fewer seeds than the others, one lucky seed could win.
    most = max((len(runs[name]) for name in tuned), default=0)
    tuned = [name for name in tuned if len(runs[name]) == most]
    return max(tuned, key=lambda n: mean(r["score"] for r in _last_rows(runs, n)), default="")


def _baselines(runs: Runs) -> list[str]:
    """Return the runs to compare recipes with: dense and tuned dense, if measured."""
    names = [name for name in ("dense", _best_tuned_dense(runs)) if name in runs]
    return names or ["dense"]


def upper_limit(lost: Sequence[float]) -> float:
    """Return the upper end of the 90 % interval of the mean, by Student's t."""
    if len(lost) < 2:
        return math.inf
    factor = STUDENT[min(len(lost) - 1, len(STUDENT)) - 1]
    return mean(lost) + factor * stdev(lost) / math.sqrt(len(lost))


def _last_rows(runs: Runs, name: str) -> list[StudyRow]:
    """Return the last row of each seed."""
    return [rows[-1] for rows in runs[name].values()]


def _entries(runs: Runs, name: str) -> float:
    """Return the per cent of all entries that one worker chose."""
    return 100 * mean(r["entries"] / (r["d"] * r["steps"]) for r in _last_rows(runs, name))


def _bytes(runs: Runs, name: str) -> float:
    """Return the bytes sent, in per cent of an all-reduce at every step."""
    return 100 * mean(r["bytes"] / r["dense"] for r in _last_rows(runs, name))


def _summarise(epochs: int, runs: Runs) -> str:
    base, *other_bases = _baselines(runs)
    pairs = {n: lost for n in runs if n != base and (lost := _points_lost(runs, n, base))}
    few = {n: lost for n, lost in pairs.items() if _entries(runs, n) <= MOST_ENTRIES}
    if not few:
        return f"{epochs} epochs: no pair of runs within {MOST_ENTRIES:g} % yet."
    good = [
        n
        for n, lost in few.items()
        if mean(lost) < MEAN_LOSS and upper_limit(lost) < UPPER_LOSS and len(lost) >= PAIRS
    ]
    best = min(few, key=lambda n: mean(few[n]))
    summary = (
        f"{epochs} epochs: within {MOST_ENTRIES:g} % of the entries, {best} comes closest to "
        f"{base} ({-mean(few[best]):+.2f} points). The target, less than {MEAN_LOSS:g} points lost "
        f"on average and {UPPER_LOSS:g} at the upper limit over {PAIRS} seeds, is reached by "
        f"{join_names(good)}."
    )
    for other in other_bases:
        if lost := _points_lost(runs, best, other):
            summary += f" Against {other} {best} ends at {_points(lost)}"
            summary += f", at most {upper_limit(lost):.2f} lost." if len(lost) > 1 else "."
    return summary


def _points(lost: Sequence[float]) -> str:
    """Return the mean difference, and its standard deviation if there are several pairs."""
    spread = f" +- {stdev(lost):.2f}" if len(lost) > 1 else ""
    return f"{-mean(lost):+.2f}{spread}" if lost else ""


def _table(model: str, epochs: int, runs: Runs) -> StudyTable:
    body = []
    for name in runs:
        last = _last_rows(runs, name)
        scores = [100 * row["score"] for row in last]
        line = [
            name,
            f"{mean(scores):.2f}",
            f"{min(scores):.2f} to {max(scores):.2f}",
            str(len(last)),
        ]
        for base in _baselines(runs):
            lost = _points_lost(runs, name, base) if name != base else []
            line += [_points(lost), f"{upper_limit(lost):.2f}" if len(lost) > 1 else ""]
        line += [f"{_entries(runs, name):.3g} %", f"{_bytes(runs, name):.3g} %"]
        body.append([*line, format_bytes(mean(row["bytes"] for row in last))])
    columns = ["", "test accuracy, %", "from to", "seeds"]
    for base in _baselines(runs):
        columns += [f"points against {base}", f"most lost against {base}"]
    columns += ["entries", "bytes of dense", "bytes"]
    any_row = _last_rows(runs, next(iter(runs)))[0]
    note = (
        f"{epochs} epochs, d = {any_row['d']:,}; "
        f"all residuals take {format_bytes(any_row['residual_bytes'])}. "
        f"Activations of dense: {any_row.get('activations', 'fp32')}. "
        "Pairs share seed and order of examples. Most lost: the upper end of the 90 % "
        "interval of the mean difference (t). Entries: what a worker chose, over d and all steps "
        "of dense (with the union its values go wherever any worker chose); bytes: what left all "
        "workers, over that of an all-reduce at every one of them. twice: trained for twice as "
        "many epochs as dense."
    )
    return StudyTable(f"{model}, {epochs} epochs", columns, body, note)


def _course_chart(model: str, epochs: int, runs: Runs) -> Chart:
    """Draw the mean accuracy after each epoch against the bytes sent so far."""
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


def _final_chart(model: str, epochs: int, runs: Runs) -> Chart:
    """Draw the final accuracy of every seed against all bytes sent."""
    lines = []
    for name in runs:
        ys = [100 * row["score"] for row in _last_rows(runs, name)]
        xs = [float(f"{_bytes(runs, name):.3g}")] * len(ys)
        lines.append(Line(name, xs, ys, "points", GREY if name == "dense" else ""))
    caption = f"{model}, {epochs} epochs: where every seed ends, against all that was sent"
    label = "bytes, % of an all-reduce at every step"
    return Chart(f"{model}-{epochs}-ends", caption, label, "test accuracy, %", lines, log_x=True)


CHARTS = (_final_chart, _course_chart)
