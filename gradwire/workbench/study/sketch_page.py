"""The page of study `sketch`: recall on real u, accuracy and time at equal bytes."""

from collections.abc import Sequence

from gradwire.plan.network import LATENCY, link_rate
from gradwire.workbench.report.chart import GREY, Chart, Line
from gradwire.workbench.report.curves import COLOURS
from gradwire.workbench.report.outcome import size
from gradwire.workbench.study.study import Page, Row, Table, listed

MIDDLE = 1
"""Of the numbers of candidates the one that is drawn: 4 for each of the k, the default."""
LINKS = ("1gbit", "10gbit")
NAMES = {"gtopk": "gTop-k", "sketched": "Sketched-SGD", "gs-sgd": "gs-SGD"}
PAPER = {"gtopk": "1.3 to 3.1", "sketched": "1.1 to 1.2"}
"""Throughput of gs-SGD over theirs, from the abstract of Dai et al. (2021)."""


def page(rows: Sequence[Row]) -> Page:
    """As much of it as there are rows for."""
    found, runs, times = ([r for r in rows if r["what"] == w] for w in ("u", "train", "time"))
    says, tables, charts = [], [], []
    if found:
        says.append(_says_recall(found))
        tables.append(_recall_table(found))
        for model in dict.fromkeys(r["model"] for r in found):
            charts.append(_recall_chart(model, [r for r in found if r["model"] == model]))
    if runs:
        says.append(_says_runs(runs))
        tables.append(_run_table(runs))
        charts.append(_run_chart(runs))
    if times:
        says.append(_says_times(times))
        tables.append(_time_table(times))
    return Page(" ".join(says), tables, charts)


def _label(row: Row) -> str:
    return f"{row['model']}, {row['recipe']}"


def _says_recall(rows: Sequence[Row]) -> str:
    ten = sorted((r["recall"][MIDDLE], _label(r)) for r in rows if r["ratio"] == 10)
    if not ten:
        return ""
    (low, worst), (high, best) = ten[0], ten[-1]
    return (
        f"A sketch ten times smaller than u, with four candidates for each of the k = 0.001 d, "
        f"finds {100 * low:.0f} % ({worst}) to {100 * high:.0f} % ({best}) of the k largest "
        "entries of the mean u."
    )


def _recall_chart(model: str, rows: Sequence[Row]) -> Chart:
    lines = []
    for recipe, colour in zip(dict.fromkeys(r["recipe"] for r in rows), COLOURS, strict=False):
        own = sorted((r for r in rows if r["recipe"] == recipe), key=lambda r: r["ratio"])
        for name, style in (("recall", "dots"), ("energy", "dotted")):
            ys = [r[name][MIDDLE] for r in own]
            label = f"{recipe}, {name}"
            lines.append(Line(label, [r["ratio"] for r in own], ys, style, colour))
    caption = f"u of {model}: the share of the k largest that a sketch finds, and of their energy"
    chart = Chart(f"sketch-{model}", caption, "d / cells of the table", "share", lines, log_x=True)
    return chart.within(0, 1.05)


def _recall_table(rows: Sequence[Row]) -> Table:
    ratios = sorted({r["ratio"] for r in rows}, reverse=True)
    body = []
    for label in dict.fromkeys(map(_label, rows)):
        own = {r["ratio"]: r for r in rows if _label(r) == label}
        tail = next(iter(own.values()))["tail"]
        body.append([label, f"{tail:.1f}", *(_shares(own[x]) if x in own else "" for x in ratios)])
    note = f"Recall and energy, of the mean u of the workers after {rows[0]['steps']} steps; five "
    note += "rows, four candidates for each of the k, the mean of three sketches. u is that of "
    note += "workers who train with the exchange named: what they send is missing from its tail. "
    note += "The papers give no such numbers."
    columns = ["d / cells of the sketch:", "tail index", *(f"{x:g}" for x in ratios)]
    return Table("What a sketch finds in real u", columns, body, note)


def _shares(row: Row) -> str:
    """ ".48, .74": a wide table has no room for zeros."""
    both = (f"{row[name][MIDDLE]:.2f}".removeprefix("0") for name in ("recall", "energy"))
    return ", ".join(both)


def _name(row: Row) -> str:
    if row["recipe"] == "dense":
        return "dense"
    return f"{NAMES[row['recipe'].partition('/')[2]]}, bytes of a sketch of d / {row['ratio']:g}"


def _runs(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(_name(row), []).append(row)
    return found


def _says_runs(rows: Sequence[Row]) -> str:
    words = []
    for ratio in sorted({r["ratio"] for r in rows if r["ratio"]}, reverse=True):
        last = {r["recipe"]: r["score"] for r in rows if r["ratio"] == ratio}
        scores = [f"{NAMES[n.partition('/')[2]]} {100 * s:.1f} %" for n, s in last.items()]
        words.append(f"with the bytes of a sketch of d / {ratio:g} {listed(scores)}")
    dense = [f", dense {100 * r['score']:.1f} %" for r in rows if r["recipe"] == "dense"][-1:]
    some = rows[-1]
    head = (
        f"{some['model']}, {some['workers']} workers, test accuracy after {some['epochs']} epochs"
    )
    return f"{head}: {'; '.join(words)}{''.join(dense)}."


def _run_chart(rows: Sequence[Row]) -> Chart:
    lines = []
    for name, run in _runs(rows).items():
        colour, style = (GREY, "dashes") if name == "dense" else ("", "dots")
        xs, ys = [r["bytes"] / 1e6 for r in run], [100 * r["score"] for r in run]
        lines.append(Line(name, xs, ys, style, colour))
    caption = f"{rows[0]['model']}, {rows[0]['workers']} workers: accuracy against bytes"
    return Chart(
        "sketch-bytes", caption, "MB sent by all workers", "test accuracy, %", lines, log_x=True
    )


def _run_table(rows: Sequence[Row]) -> Table:
    body = []
    for name, run in _runs(rows).items():
        last = run[-1]
        density = "" if name == "dense" else f"{100 * last['density']:.2g} %"
        sent = size(last["bytes"] / last["steps"] / last["workers"])
        body.append([name, density, sent, f"{100 * last['score']:.1f} %"])
    some = rows[-1]
    note = f"{some['model']}, {some['workers']} workers, {some['epochs']} epochs, seed "
    note += (
        f"{some['seed']}. gTop-k gets the density at which it sends as many bytes. Sketched-SGD "
    )
    note += "and gs-SGD add the same numbers in another order."
    columns = ["", "density", "bytes a worker and step", "test accuracy"]
    return Table("Accuracy at equal bytes", columns, body, note)


def step_seconds(row: Row, link: str) -> float:
    """local work + rounds x latency + bytes / rate: an exchange with nothing to hide behind."""
    return row["local"] + row["rounds"] * LATENCY + row["bytes"] / link_rate(link)


Key = tuple[int, int, float]


def _sides(rows: Sequence[Row]) -> dict[Key, dict[str, Row]]:
    """By entries, workers and budget, the exchanges that ran."""
    found: dict[Key, dict[str, Row]] = {}
    for r in rows:
        if not r["why"]:
            key = (r["size"], r["workers"], r["ratio"])
            found.setdefault(key, {})[r["exchange"]] = r
    return {key: side for key, side in found.items() if "gs-sgd" in side}


def _says_times(rows: Sequence[Row]) -> str:
    words = []
    for name, claim in PAPER.items():
        ratios = [
            step_seconds(side[name], link) / step_seconds(side["gs-sgd"], link)
            for side in _sides(rows).values()
            if name in side
            for link in LINKS
        ]
        if ratios:
            words.append(
                f"{min(ratios):.2f} to {max(ratios):.2f} times that of {NAMES[name]} "
                f"(paper: {claim})"
            )
    return f"At equal bytes gs-SGD exchanges at a rate {listed(words)}." if words else ""


def _time_table(rows: Sequence[Row]) -> Table:
    body = []
    for (entries, workers, ratio), side in _sides(rows).items():
        for name, row in side.items():
            seconds = [step_seconds(row, link) for link in LINKS]
            rates = [
                f"{s / step_seconds(side['gs-sgd'], link):.2f}"
                for s, link in zip(seconds, LINKS, strict=True)
            ]
            body.append(
                [f"{NAMES[name]}, d / {ratio:g}", f"{entries:,}", str(workers), size(row["bytes"])]
                + [str(row["rounds"]), f"{1e3 * row['local']:.3g}"]
                + [f"{1e3 * s:.3g} ({r})" for s, r in zip(seconds, rates, strict=True)]
                + [PAPER.get(name, "")]
            )
    note = "local: one worker's own work, measured on this machine with virtual workers. By link: "
    note += f"local + rounds x {1e6 * LATENCY:g} us + bytes / rate, in ms, computed, and in "
    note += "brackets over that of gs-SGD: how many times its throughput is theirs if a step were "
    note += "nothing but the exchange. The paper's is of whole steps on a cluster of its own."
    columns = ["at the bytes of a sketch of", "entries", "workers", "bytes", "rounds", "local, ms"]
    columns += [f"{link}, ms" for link in LINKS]
    return Table("Time of an exchange at equal bytes", [*columns, "paper"], body, note)
