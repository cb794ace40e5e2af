"""The page of `study language`: the best learning rate of each recipe, and loss against bytes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from gradwire.workbench.report.chart import GREY, Chart, Line
from gradwire.workbench.report.outcome import format_bytes
from gradwire.workbench.study.language.recipes import RECIPES
from gradwire.workbench.study.study import Page, StudyRow, StudyTable

TASK = ("model", "width", "depth", "data", "workers", "tokens", "steps")
"""Columns that the runs of one table have in common."""
DENSE = ("dense-adamw", "dense-muon")


@dataclass(frozen=True)
class Contender:
    """A recipe with the steps per round that was run, at its best learning rate.

    rates: every learning rate that was run, with its mean loss on the validation text.
    last: the last row of each seed at the best of them.
    """

    name: str
    rates: dict[float, float]
    last: list[StudyRow]

    @property
    def lr(self) -> float:
        return float(self.last[0]["lr"])

    @property
    def test(self) -> float:
        return mean(row["test"] for row in self.last)

    @property
    def fewer(self) -> float:
        """Bytes of a dense all-reduce at every step over the bytes sent."""
        sent = sum(row["bytes"] for row in self.last)
        return sum(row["dense"] for row in self.last) / sent if sent else math.inf

    @property
    def at_edge(self) -> bool:
        """True: a better learning rate may lie beside those that were run."""
        return self.lr in (min(self.rates), max(self.rates))


def make_page(rows: Sequence[StudyRow]) -> Page:
    """Compare the recipes of each model, number of workers and length of run."""
    tasks: dict[tuple[object, ...], list[StudyRow]] = {}
    for row in rows:
        if "test" in row:
            tasks.setdefault(tuple(row[name] for name in TASK), []).append(row)
    found = [_contenders(ended) for ended in tasks.values()]
    return Page(
        " ".join(map(_summarise, found)),
        [_table(contenders) for contenders in found],
        [_chart(contenders) for contenders in found],
    )


def _contenders(ended: Sequence[StudyRow]) -> list[Contender]:
    """Return each recipe at the learning rate with the lowest loss on the validation text."""
    runs: dict[str, dict[float, list[StudyRow]]] = {}
    for row in ended:
        usual = RECIPES[row["recipe"]].rounds.get("every", 1)
        name = row["recipe"] + (f", H = {row['every']}" if row["every"] != usual else "")
        runs.setdefault(name, {}).setdefault(row["lr"], []).append(row)
    contenders = []
    for name, by_rate in runs.items():
        losses = {lr: mean(row["valid"] for row in seeds) for lr, seeds in by_rate.items()}
        best = min(losses, key=losses.__getitem__)
        contenders.append(Contender(name, dict(sorted(losses.items())), by_rate[best]))
    return sorted(contenders, key=lambda contender: contender.test)


def _task(row: StudyRow) -> str:
    """Return the task in words."""
    return (
        f"{row['model']} ({row['d']:,} parameters) on {row['data']}, {row['workers']} workers, "
        f"{row['steps']:,} steps of {row['tokens']:,} tokens"
    )


def _summarise(contenders: Sequence[Contender]) -> str:
    """Return the best of those with 50 and with 500 times fewer bytes, in words."""
    dense = {c.name: c.test for c in contenders if c.name in DENSE}
    parts = []
    for least in (500, 50):
        sparing = [c for c in contenders if c.fewer >= least and c.name not in DENSE]
        if sparing:
            best = min(sparing, key=lambda c: c.test)
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
    """Return the leaderboard of a task."""
    dense = {c.name: c.test for c in contenders}
    body = []
    for c in contenders:
        rates = ", ".join(f"{lr:g}: {loss:.4f}" for lr, loss in c.rates.items())
        losses = [row["test"] for row in c.last]
        ends = f" ({min(losses):.4f} to {max(losses):.4f})" if len(losses) > 1 else ""
        seeds = ", ".join(str(row["seed"]) for row in c.last)
        body.append(
            [
                c.name,
                f"{c.lr:g}{' (at the edge)' if c.at_edge else ''}",
                f"{mean(row['valid'] for row in c.last):.4f}",
                f"{c.test:.4f}{ends}",
                *(_gap(c.test, dense[name]) if name in dense else "" for name in DENSE),
                f"{mean(row['bits'] for row in c.last):.3g}",
                f"{c.fewer:,.0f}x",
                format_bytes(round(mean(row["memory"] for row in c.last))),
                f"{mean(row['seconds'] for row in c.last) / c.last[0]['steps']:.3f}",
                seeds,
                rates,
            ]
        )
    columns = ["", "lr", "valid", "test", *(f"against {name}" for name in DENSE)]
    columns += ["bits", "fewer bytes", "peak memory", "s per step", "seeds", "valid by lr"]
    missing = [name for name in RECIPES if not any(c.name == name for c in contenders)]
    note = (
        "Losses in nats per token, means over seeds. The learning rate is the best on the "
        "validation text; at the edge: none beyond it was run. bits: sent per entry, worker and "
        "step. Fewer bytes: than a ring all-reduce of fp32 at every step. Peak memory and seconds "
        "are of all workers on one device. "
        + (f"Not run: {', '.join(missing)}." if missing else "Every recipe was run.")
    )
    return StudyTable(_task(contenders[0].last[0]), columns, body, note)


def _chart(contenders: Sequence[Contender]) -> Chart:
    """Return the picture of loss against bytes, a point per recipe."""
    lines = [
        Line(
            c.name,
            [c.last[0]["bytes"] / c.last[0]["dense"] * 100],
            [c.test],
            "points",
            GREY if c.name in DENSE else "",
        )
        for c in contenders
    ]
    row = contenders[0].last[0]
    name = f"language-{row['model']}-{row['width']}x{row['depth']}-{row['workers']}-{row['steps']}"
    label = "bytes, % of an all-reduce at every step"
    return Chart(name, _task(row), label, "test loss, nats per token", lines, log_x=True)
