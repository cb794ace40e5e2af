"""Make the page of the study `sketch`: recall on u, accuracy and time at equal bytes."""

from collections.abc import Sequence

from gradwire.plan.network import LATENCY, link_rate
from gradwire.workbench.report.chart import GREY, Chart, Line
from gradwire.workbench.report.curves import COLOURS
from gradwire.workbench.report.outcome import format_bytes
from gradwire.workbench.study.study import Page, StudyRow, StudyTable, join_names

SHOWN = 1
"""Index into the study's CANDIDATES that the page shows: 4 candidates per k, the default."""
LINKS = ("1gbit", "10gbit")
NAMES = {"gtopk": "gTop-k", "sketched": "Sketched-SGD", "gs-sgd": "gs-SGD"}
PAPER_SPEEDUPS = {"gtopk": "1.3 to 3.1", "sketched": "1.1 to 1.2"}
"""Throughput of gs-SGD over that of each exchange, from the abstract of Dai et al. (2021)."""


def page(rows: Sequence[StudyRow]) -> Page:
    """Show recall, accuracy and times, each if rows for it exist."""
    recalls = [r for r in rows if r["what"] == "u"]
    runs = [r for r in rows if r["what"] == "train"]
    times = [r for r in rows if r["what"] == "time"]
    sentences, tables, charts = [], [], []
    if recalls:
        sentences.append(_recall_summary(recalls))
        tables.append(_recall_table(recalls))
        for model in dict.fromkeys(r["model"] for r in recalls):
            charts.append(_recall_chart(model, [r for r in recalls if r["model"] == model]))
    if runs:
        sentences.append(_accuracy_summary(runs))
        tables.append(_run_table(runs))
        charts.append(_run_chart(runs))
    if times:
        sentences.append(_times_summary(times))
        tables.append(_time_table(times))
    return Page(" ".join(sentences), tables, charts)


def _label(row: StudyRow) -> str:
    return f"{row['model']}, {row['recipe']}"


def _recall_summary(rows: Sequence[StudyRow]) -> str:
    at_ten = sorted((r["recall"][SHOWN], _label(r)) for r in rows if r["ratio"] == 10)
    if not at_ten:
        return ""
    (low, worst), (high, best) = at_ten[0], at_ten[-1]
    return (
        f"A sketch ten times smaller than u, with four candidates for each of the k = 0.001 d, "
        f"finds {100 * low:.0f} % ({worst}) to {100 * high:.0f} % ({best}) of the k largest "
        "entries of the mean u."
    )


def _recall_chart(model: str, rows: Sequence[StudyRow]) -> Chart:
    lines = []
    for recipe, colour in zip(dict.fromkeys(r["recipe"] for r in rows), COLOURS, strict=False):
        by_ratio = sorted((r for r in rows if r["recipe"] == recipe), key=lambda r: r["ratio"])
        for name, style in (("recall", "dots"), ("energy", "dotted")):
            ys = [r[name][SHOWN] for r in by_ratio]
            label = f"{recipe}, {name}"
            lines.append(Line(label, [r["ratio"] for r in by_ratio], ys, style, colour))
    caption = f"u of {model}: the share of the k largest that a sketch finds, and of their energy"
    chart = Chart(f"sketch-{model}", caption, "d / cells of the table", "share", lines, log_x=True)
    return chart.with_y_range(0, 1.05)


def _recall_table(rows: Sequence[StudyRow]) -> StudyTable:
    ratios = sorted({r["ratio"] for r in rows}, reverse=True)
    body = []
    for label in dict.fromkeys(map(_label, rows)):
        by_ratio = {r["ratio"]: r for r in rows if _label(r) == label}
        tail = next(iter(by_ratio.values()))["tail"]
        body.append(
            [label, f"{tail:.1f}", *(_shares(by_ratio[x]) if x in by_ratio else "" for x in ratios)]
        )
    note = f"Recall and energy, of the mean u of the workers after {rows[0]['steps']} steps; five "
    note += "rows, four candidates for each of the k, the mean of three sketches. u is that of "
    note += "workers who train with the exchange named: what they send is missing from its tail. "
    note += "The papers give no such numbers."
    columns = ["d / cells of the sketch:", "tail index", *(f"{x:g}" for x in ratios)]
    return StudyTable("What a sketch finds in real u", columns, body, note)


def _shares(row: StudyRow) -> str:
    """Return recall and energy as ".48, .74", without zeros because the table is wide."""
    shares = (f"{row[name][SHOWN]:.2f}".removeprefix("0") for name in ("recall", "energy"))
    return ", ".join(shares)


def _run_name(row: StudyRow) -> str:
    if row["recipe"] == "dense":
        return "dense"
    return f"{NAMES[row['recipe'].partition('/')[2]]}, bytes of a sketch of d / {row['ratio']:g}"


def _runs_by_name(rows: Sequence[StudyRow]) -> dict[str, list[StudyRow]]:
    runs: dict[str, list[StudyRow]] = {}
    for row in rows:
        runs.setdefault(_run_name(row), []).append(row)
    return runs


def _accuracy_summary(rows: Sequence[StudyRow]) -> str:
    words = []
    for ratio in sorted({r["ratio"] for r in rows if r["ratio"]}, reverse=True):
        last = {r["recipe"]: r["score"] for r in rows if r["ratio"] == ratio}
        scores = [f"{NAMES[n.partition('/')[2]]} {100 * s:.1f} %" for n, s in last.items()]
        words.append(f"with the bytes of a sketch of d / {ratio:g} {join_names(scores)}")
    dense = [f", dense {100 * r['score']:.1f} %" for r in rows if r["recipe"] == "dense"][-1:]
    any_row = rows[-1]
    head = f"{any_row['model']}, {any_row['workers']} workers, "
    head += f"test accuracy after {any_row['epochs']} epochs"
    return f"{head}: {'; '.join(words)}{''.join(dense)}."


def _run_chart(rows: Sequence[StudyRow]) -> Chart:
    lines = []
    for name, run in _runs_by_name(rows).items():
        colour, style = (GREY, "dashes") if name == "dense" else ("", "dots")
        xs, ys = [r["bytes"] / 1e6 for r in run], [100 * r["score"] for r in run]
        lines.append(Line(name, xs, ys, style, colour))
    caption = f"{rows[0]['model']}, {rows[0]['workers']} workers: accuracy against bytes"
    return Chart(
        "sketch-bytes", caption, "MB sent by all workers", "test accuracy, %", lines, log_x=True
    )


def _run_table(rows: Sequence[StudyRow]) -> StudyTable:
    body = []
    for name, run in _runs_by_name(rows).items():
        last = run[-1]
        density = "" if name == "dense" else f"{100 * last['density']:.2g} %"
        sent = format_bytes(last["bytes"] / last["steps"] / last["workers"])
        body.append([name, density, sent, f"{100 * last['score']:.1f} %"])
    any_row = rows[-1]
    note = f"{any_row['model']}, {any_row['workers']} workers, {any_row['epochs']} epochs, seed "
    note += (
        f"{any_row['seed']}. gTop-k gets the density at which it sends as many bytes. Sketched-SGD "
    )
    note += "and gs-SGD add the same numbers in another order."
    columns = ["", "density", "bytes a worker and step", "test accuracy"]
    return StudyTable("Accuracy at equal bytes", columns, body, note)


def step_seconds(row: StudyRow, link: str) -> float:
    """Return local work + rounds x latency + bytes / rate: an exchange without overlap."""
    return row["local"] + row["rounds"] * LATENCY + row["bytes"] / link_rate(link)


Setting = tuple[int, int, float]
"""Entries, workers, and the sketch size as d / cells."""


def _rows_by_setting(rows: Sequence[StudyRow]) -> dict[Setting, dict[str, StudyRow]]:
    """Return the rows of each setting by exchange, for settings in which gs-SGD ran."""
    settings: dict[Setting, dict[str, StudyRow]] = {}
    for row in rows:
        if not row["why"]:
            setting = (row["size"], row["workers"], row["ratio"])
            settings.setdefault(setting, {})[row["exchange"]] = row
    return {setting: by_name for setting, by_name in settings.items() if "gs-sgd" in by_name}


def _times_summary(rows: Sequence[StudyRow]) -> str:
    words = []
    for name, claim in PAPER_SPEEDUPS.items():
        ratios = [
            step_seconds(by_name[name], link) / step_seconds(by_name["gs-sgd"], link)
            for by_name in _rows_by_setting(rows).values()
            if name in by_name
            for link in LINKS
        ]
        if ratios:
            words.append(
                f"{min(ratios):.2f} to {max(ratios):.2f} times that of {NAMES[name]} "
                f"(paper: {claim})"
            )
    return f"At equal bytes gs-SGD exchanges at a rate {join_names(words)}." if words else ""


def _time_table(rows: Sequence[StudyRow]) -> StudyTable:
    body = []
    for (entries, workers, ratio), by_name in _rows_by_setting(rows).items():
        for name, row in by_name.items():
            seconds = [step_seconds(row, link) for link in LINKS]
            rates = [
                f"{s / step_seconds(by_name['gs-sgd'], link):.2f}"
                for s, link in zip(seconds, LINKS, strict=True)
            ]
            body.append(
                [
                    f"{NAMES[name]}, d / {ratio:g}",
                    f"{entries:,}",
                    str(workers),
                    format_bytes(row["bytes"]),
                ]
                + [str(row["rounds"]), f"{1e3 * row['local']:.3g}"]
                + [f"{1e3 * s:.3g} ({r})" for s, r in zip(seconds, rates, strict=True)]
                + [PAPER_SPEEDUPS.get(name, "")]
            )
    note = "local: one worker's own work, measured on this machine with virtual workers. By link: "
    note += f"local + rounds x {1e6 * LATENCY:g} us + bytes / rate, in ms, computed, and in "
    note += "brackets over that of gs-SGD: how many times its throughput is theirs if a step were "
    note += "nothing but the exchange. The paper's is of whole steps on a cluster of its own."
    columns = ["at the bytes of a sketch of", "entries", "workers", "bytes", "rounds", "local, ms"]
    columns += [f"{link}, ms" for link in LINKS]
    return StudyTable("Time of an exchange at equal bytes", [*columns, "paper"], body, note)
