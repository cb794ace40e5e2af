"""Measure the loss of AdamW with top-k and error feedback.

Error feedback delivers an entry late and in one piece, so the moments of AdamW see rare, large
values.
"""

from collections.abc import Sequence
from statistics import mean
from typing import Any

from gradwire.workbench.study.language import (
    DENSE,
    LanguageRecipe,
    Runs,
    list_cells,
    loss_chart,
    loss_gaps,
    loss_table,
    runs_by_task,
    train_rows,
)
from gradwire.workbench.study.study import Cell, Page, Settings, Study, StudyRow

STEPS = {
    ("gpt-nano", "shakespeare"): 1500,
    ("gpt-nano", "wikitext2"): 1200,
    ("gpt-micro", "wikitext2"): 800,
}
"""Steps of the full study, by model and data set."""
SMALL_STEPS = 120
INT4: dict[str, Any] = {"method": "topk", "density": 0.05, "values": "int4", "indices": "packed"}


def _adam_first(every: int, density: float, values: str, **outer: Any) -> LanguageRecipe:
    local = {"every": every, "density": density, "values": values, "indices": "auto"}
    return LanguageRecipe(1e-3, options=DENSE.options, local=local | outer)


RECIPES = {
    "dense": DENSE,
    "topk-1": LanguageRecipe(2e-3, options={"method": "topk", "density": 0.01}),
    "topk-1-union": LanguageRecipe(
        2e-3, options={"method": "topk", "density": 0.01, "exchange": "union"}
    ),
    "topk-5-int4": LanguageRecipe(2e-3, options=INT4),
    "topk-5-int4-warm": LanguageRecipe(
        2e-3, options=INT4 | {"warmup": (0.25,), "warmup_steps": 150}
    ),
    "first-1": _adam_first(1, 0.05, "int4", outer="average"),
    "first-5": _adam_first(5, 0.5, "sign"),
    "first-10": _adam_first(10, 0.5, "int4"),
}
"""All recipes by name.

first-N: local steps. Each worker runs AdamW on its own gradient. The change of the weights by N
steps is compressed.
"""

WIKITEXT_RECIPES = ("dense", "topk-5-int4", "first-5")
"""Recipes that are measured on WikiText-2."""


def cells(settings: Settings) -> list[Cell]:
    """List a cell per training run."""
    return [
        cell
        for cell in list_cells(settings, STEPS, RECIPES)
        if cell["data"] != "wikitext2" or cell["recipe"] in WIKITEXT_RECIPES
    ]


def measure(settings: Settings, cell: Cell) -> list[StudyRow]:
    """Train the cell's recipe; return a row per evaluation."""
    steps = SMALL_STEPS if settings.small else STEPS[cell["model"], cell["data"]]
    return list(train_rows(settings, cell, RECIPES[cell["recipe"]], steps))


def page(rows: Sequence[StudyRow]) -> Page:
    """Name the recipes that come closest to the loss of dense AdamW, and farthest from it."""
    tasks = runs_by_task(rows)
    summary = " ".join(_summarise(name, runs) for name, runs in tasks.items())
    tables = [loss_table(name, runs) for name, runs in tasks.items()]
    return Page(summary, tables, [loss_chart("adam", name, runs) for name, runs in tasks.items()])


def _summarise(name: str, runs: Runs) -> str:
    mean_gaps = {r: mean(gap) for r in runs if r != "dense" and (gap := loss_gaps(runs, r))}
    if not mean_gaps:
        return f"{name} has no pair of runs yet."
    order = sorted(mean_gaps, key=mean_gaps.__getitem__)
    ends = [f"{recipe} ({100 * mean_gaps[recipe]:+.1f} %)" for recipe in (order[0], order[-1])]
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
