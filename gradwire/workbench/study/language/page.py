"""The page of `study language`: the leaderboard of each task, and loss against bytes."""

import math
from collections.abc import Sequence
from statistics import mean

from gradwire.workbench.report.chart import GREY, Chart, Line
from gradwire.workbench.report.outcome import format_bytes
from gradwire.workbench.study.language.contenders import (
    DENSE,
    Contender,
    find_tasks,
    recipes_not_run,
)
from gradwire.workbench.study.study import Page, StudyRow, StudyTable

HEIGHT = 1.25
"""Losses above this times the lowest are not drawn, because the others would be one line."""
COLUMNS = (
    "", "lr", "valid at half the lr", "valid", "valid at twice the lr", "test", "seeds",
    *(f"against {name}" for name in DENSE),
    "bits", "bits per round", "fewer bytes", "peak memory", "s per step", "note", "command",
)  # fmt: skip


def make_page(rows: Sequence[StudyRow]) -> Page:
    """Compare the recipes of each model, number of workers and length of run."""
    tasks = find_tasks(rows)
    return Page(
        " ".join(map(_summarise, tasks)),
        [_table(contenders) for contenders in tasks],
        [_chart(contenders) for contenders in tasks],
    )


def _task(row: StudyRow) -> str:
    """Return the task in words."""
    text = (
        f"{row['data']} as {row['vocabulary']:,} tokens" if row.get("vocabulary") else row["data"]
    )
    return (
        f"{row['model']} ({row['d']:,} parameters) on {text}, {row['workers']} workers, "
        f"{row['steps']:,} steps of {row['tokens']:,} tokens"
    )


def _summarise(contenders: Sequence[Contender]) -> str:
    """Return the best of those with 50 and with 500 times fewer bytes, in words."""
    dense = {c.name: c.test for c in contenders if c.name in DENSE}
    parts, said = [], []
    for least in (500, 50):
        sparing = [c for c in contenders if c.fewer >= least and c.name not in DENSE]
        best = min(sparing, key=lambda c: c.test, default=None)
        if best and best not in said:
            said.append(best)
            gaps = [f"{_gap(best.test, loss)} of {name}" for name, loss in dense.items()]
            parts.append(
                f"{best.name} sends {best.fewer:,.0f} times fewer bytes and ends at a test loss of "
                f"{best.test:.4f}" + (f", {' and '.join(gaps)}" if gaps else "")
            )
    words = "; ".join(parts) or "no recipe sends 50 times fewer bytes"
    return f"{_task(contenders[0].last[0])}: {words}."


def _gap(loss: float, other: float) -> str:
    return f"{100 * (loss / other - 1):+.1f} %"


def _table(contenders: Sequence[Contender]) -> StudyTable:
    """Return the leaderboard of a task; recipes that were not run are rows too."""
    dense = {c.name: c.test for c in contenders}
    has_tokens = bool(contenders[0].last[0].get("vocabulary"))
    body = [_line(c, dense, has_tokens) for c in contenders]
    missing = recipes_not_run(contenders)
    body += [[name, *[""] * (len(COLUMNS) - 3), "not run", ""] for name in missing]
    note = (
        "Losses in nats per token"
        + (", and per byte in brackets. " if has_tokens else ", which is a byte here. ")
        + "Test losses are means over the seeds, with the lowest and the highest. The learning "
        "rate is the best on the validation text. bits: sent per entry, worker and step. bits per "
        "round: of both halves of an exchange together, 64 H / fewer bytes. Fewer bytes: than a "
        "ring all-reduce of fp32 at every step. All bytes are counted, not computed. Peak memory "
        "and seconds are of all workers on one device, which other runs may have shared."
    )
    return StudyTable(_task(contenders[0].last[0]), COLUMNS, body, note)


def _line(c: Contender, dense: dict[str, float], has_tokens: bool) -> list[str]:
    losses = [row["test"] for row in c.last]
    test = f"{c.test:.4f}"
    if has_tokens:
        test += f" ({mean(row['test_byte'] for row in c.last):.4f})"
    if len(losses) > 1:
        test += f", {min(losses):.4f} to {max(losses):.4f}"
    return [
        c.name,
        f"{c.lr:g}",
        _loss(c.loss_at(0.5)),
        f"{c.valid:.4f}",
        _loss(c.loss_at(2)),
        test,
        ", ".join(str(row["seed"]) for row in c.last),
        *(_gap(c.test, dense[name]) if name in dense else "" for name in DENSE),
        f"{c.bits:.3g}",
        f"{c.round_bits:.3g}",
        f"{c.fewer:,.0f}x",
        format_bytes(round(mean(row["memory"] for row in c.last))),
        f"{mean(row['seconds'] / max(1, row['step']) for row in c.last):.3f}",
        _warning(c),
        c.command,
    ]


def _loss(loss: float | None) -> str:
    """Return a loss, or words where there is none."""
    if loss is None:
        return "not run"
    return f"{loss:.4f}" if math.isfinite(loss) else "diverged"


def _warning(c: Contender) -> str:
    """Return a warning if a better rate may lie beside those that were run."""
    if not c.untried:
        return ""
    rates = " and ".join(f"{lr:g}" for lr in c.untried)
    return f"not tuned: lr {rates} not run (--extend)"


def _chart(contenders: Sequence[Contender]) -> Chart:
    """Return the picture of loss against bytes, a point per recipe."""
    ceiling = HEIGHT * min(c.test for c in contenders)
    shown = [c for c in contenders if c.test <= ceiling]
    lines = [
        Line(c.name, [100 / c.fewer], [c.test], "points", GREY if c.name in DENSE else "")
        for c in shown
        if c.fewer < math.inf
    ]
    row = contenders[0].last[0]
    parts = (row["model"], f"{row['width']}x{row['depth']}", row["workers"], row["steps"])
    name = "-".join(["language", *map(str, parts), str(row.get("text", ""))]).rstrip("-")
    if row.get("vocabulary"):
        name += f"-{row['vocabulary']}"
    label = "bytes sent, % of an all-reduce at every step"
    if left := [f"{c.name} {c.test:.3f}" for c in contenders if c not in shown]:
        label += f"\n(above the picture: {', '.join(left)})"
    unit = "test loss, nats per token"
    return Chart(name, _task(row), label, unit, lines, log_x=True, named_points=True)
