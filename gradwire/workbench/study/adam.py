"""What error feedback does with AdamW: gradients that come late, in one piece, into its moments."""

from collections.abc import Sequence
from statistics import mean
from typing import Any

from gradwire.workbench.study.language import (
    DENSE,
    Recipe,
    Runs,
    by_task,
    cells_of,
    chart,
    follow,
    gaps,
    table,
)
from gradwire.workbench.study.study import Cell, Page, Row, Settings, Study

STEPS = {
    ("gpt-nano", "shakespeare"): 1500,
    ("gpt-nano", "wikitext2"): 1200,
    ("gpt-micro", "wikitext2"): 800,
}
SMALL_STEPS = 120
INT4: dict[str, Any] = {"method": "topk", "density": 0.05, "values": "int4", "indices": "packed"}


def _first(every: int, density: float, values: str, **outer: Any) -> Recipe:
    local = {"every": every, "density": density, "values": values, "indices": "auto"}
    return Recipe(1e-3, given=DENSE.given, local=local | outer)


RECIPES = {
    "dense": DENSE,
    "topk-1": Recipe(2e-3, given={"method": "topk", "density": 0.01}),
    "topk-1-union": Recipe(2e-3, given={"method": "topk", "density": 0.01, "exchange": "union"}),
    "topk-5-int4": Recipe(2e-3, given=INT4),
    "topk-5-int4-warm": Recipe(2e-3, given=INT4 | {"warmup": (0.25,), "warmup_steps": 150}),
    "first-1": _first(1, 0.05, "int4", outer="average"),
    "first-5": _first(5, 0.5, "sign"),
    "first-10": _first(10, 0.5, "int4"),
}
"""first: `local_steps`. AdamW runs on each worker's own gradient, and what 1, 5 or 10 of its steps
have changed is compressed."""

WORDS = ("dense", "topk-5-int4", "first-5")
"""What is measured on WikiText-2."""


def cells(settings: Settings) -> list[Cell]:
    """A training run each."""
    found = cells_of(settings, STEPS, RECIPES)
    return [cell for cell in found if cell["data"] != "wikitext2" or cell["recipe"] in WORDS]


def measure(settings: Settings, cell: Cell) -> list[Row]:
    """A row a look."""
    steps = SMALL_STEPS if settings.small else STEPS[cell["model"], cell["data"]]
    return list(follow(settings, cell, RECIPES[cell["recipe"]], steps))


def page(rows: Sequence[Row]) -> Page:
    """Which recipe keeps dense AdamW's loss."""
    found = by_task(rows)
    says = " ".join(_says(name, runs) for name, runs in found.items())
    tables = [table(name, runs) for name, runs in found.items()]
    return Page(says, tables, [chart("adam", name, runs) for name, runs in found.items()])


def _says(name: str, runs: Runs) -> str:
    apart = {r: mean(gap) for r in runs if r != "dense" and (gap := gaps(runs, r))}
    if not apart:
        return f"{name} has no pair of runs yet."
    order = sorted(apart, key=apart.__getitem__)
    ends = [f"{recipe} ({100 * apart[recipe]:+.1f} %)" for recipe in (order[0], order[-1])]
    return f"{name}: {ends[0]} comes closest to dense AdamW, {ends[1]} stays farthest."


STUDY = Study(
    name="adam",
    title="What error feedback does with AdamW",
    figures="ours: a small GPT",
    cells=cells,
    measure=measure,
    page=page,
    files=("shakespeare", "wikitext2"),
)
