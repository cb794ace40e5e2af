"""Measure the loss of exchanging weights every 30 steps instead of gradients at every step."""

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
    lowest_loss_gaps,
    runs_by_task,
    times_fewer_bytes,
    train_rows,
)
from gradwire.workbench.study.study import Cell, Page, Settings, Study, StudyRow, join_names

EVERY, SMALL_STEPS = 30, 150
STEPS = {("gpt-micro", "shakespeare"): 4200, ("gpt-nano", "shakespeare"): 4000}
"""Steps of the full study, by model and data set."""
INT4: dict[str, Any] = {"every": EVERY, "density": 0.1, "indices": "auto"}
SIGN: dict[str, Any] = {"every": EVERY, "density": 0.168, "indices": "auto", "values": "sign"}
WHOLE: dict[str, Any] = {"every": EVERY, "method": "dense", "values": "fp32", "indices": "int32"}


def _local(sent: dict[str, Any], lr: float, momentum: float, keep: bool = False) -> LanguageRecipe:
    outer = {"outer": "nesterov", "outer_lr": lr, "outer_momentum": momentum, "keep_unsent": keep}
    return LanguageRecipe(1e-3, options=DENSE.options, local=sent | outer)


RECIPES = {
    "dense": DENSE,
    "sign-0.5-keep": _local(SIGN, 1.0, 0.5, keep=True),
    "sign-0.7-keep": _local(SIGN, 1.0, 0.7, keep=True),
    "sign-0.5": _local(SIGN, 1.0, 0.5),
    "int4-0.5": _local(INT4, 1.0, 0.5),
    "sign-diloco-keep": _local(SIGN, 0.7, 0.9, keep=True),
    "whole-0.5": _local(WHOLE, 1.0, 0.5),
    "whole-diloco": _local(WHOLE, 0.7, 0.9),
}
"""All recipes, named by the values sent, the outer momentum, and keep.

sign, int4: as many entries as 1/500 of the dense bytes allow. keep: workers keep the part of their
change that was not sent. diloco: the outer step of DiLoCo, with learning rate 0.7 and momentum 0.9.
"""

TARGET_BYTES, TARGET_LOSS = 500, 0.02
"""The target: at most 1/500 of the dense bytes, and a loss at most 2 % above dense AdamW."""


def cells(settings: Settings) -> list[Cell]:
    """List a cell per training run."""
    return list_cells(settings, STEPS, RECIPES)


def measure(settings: Settings, cell: Cell) -> list[StudyRow]:
    """Train the cell's recipe; return a row per evaluation."""
    steps = SMALL_STEPS if settings.small else STEPS[cell["model"], cell["data"]]
    return list(train_rows(settings, cell, RECIPES[cell["recipe"]], steps))


def page(rows: Sequence[StudyRow]) -> Page:
    """Name the recipes that reach the target."""
    tasks = runs_by_task(rows)
    summary = " ".join(_summarise(task, runs) for task, runs in tasks.items())
    tables = [loss_table(name, runs) for name, runs in tasks.items()]
    return Page(summary, tables, [loss_chart("local", name, runs) for name, runs in tasks.items()])


def _summarise(task: str, runs: Runs) -> str:
    if "dense" not in runs:
        return f"{task}: the dense run is missing."
    good = [name for name in runs if name != "dense" and _reaches_target(runs, name)]
    return (
        f"{task}, AdamW with {EVERY} local steps: {join_names(good)} "
        f"{'sends' if len(good) < 2 else 'send'} at most 1/{TARGET_BYTES} of the dense bytes with "
        f"a test loss within {100 * TARGET_LOSS:g} % of dense AdamW's, the lowest and the last."
    )


def _reaches_target(runs: Runs, name: str) -> bool:
    last, lowest = loss_gaps(runs, name), lowest_loss_gaps(runs, name)
    close = bool(last) and max(mean(last), mean(lowest)) <= TARGET_LOSS
    return close and times_fewer_bytes(runs, name) >= TARGET_BYTES


STUDY = Study(
    name="local-steps",
    title="What it costs to exchange weights every 30 steps",
    figures="Douillard et al. (2023), Sarfi et al. (2025)",
    cells=cells,
    measure=measure,
    page=page,
    files=("shakespeare",),
)
