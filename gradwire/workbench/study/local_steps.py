"""What it costs to exchange weights every 30 steps instead of gradients at each."""

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
    lowest_gaps,
    saving,
    table,
)
from gradwire.workbench.study.study import Cell, Page, Row, Settings, Study, listed

EVERY, SMALL_STEPS = 30, 150
STEPS = {("gpt-micro", "shakespeare"): 4200, ("gpt-nano", "shakespeare"): 4000}
INT4: dict[str, Any] = {"every": EVERY, "density": 0.1, "indices": "auto"}
SIGN: dict[str, Any] = {"every": EVERY, "density": 0.168, "indices": "auto", "values": "sign"}
WHOLE: dict[str, Any] = {"every": EVERY, "method": "dense", "values": "fp32", "indices": "int32"}


def _local(sent: dict[str, Any], lr: float, momentum: float, keep: bool = False) -> Recipe:
    outer = {"outer": "nesterov", "outer_lr": lr, "outer_momentum": momentum, "keep_unsent": keep}
    return Recipe(1e-3, given=DENSE.given, local=sent | outer)


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
"""What is sent, the outer momentum, and whether weights keep what is not sent. sign and int4 have
as many entries as 1/500 of the dense bytes allow; diloco is DiLoCo's outer step, 0.7 and 0.9."""

TARGET_BYTES, TARGET_LOSS = 500, 0.02


def cells(settings: Settings) -> list[Cell]:
    """A training run each."""
    return cells_of(settings, STEPS, RECIPES)


def measure(settings: Settings, cell: Cell) -> list[Row]:
    """A row a look."""
    steps = SMALL_STEPS if settings.small else STEPS[cell["model"], cell["data"]]
    return list(follow(settings, cell, RECIPES[cell["recipe"]], steps))


def page(rows: Sequence[Row]) -> Page:
    """Who keeps dense AdamW's loss, and for how many bytes."""
    found = by_task(rows)
    says = " ".join(_says(task, runs) for task, runs in found.items())
    tables = [table(name, runs) for name, runs in found.items()]
    return Page(says, tables, [chart("local", name, runs) for name, runs in found.items()])


def _says(task: str, runs: Runs) -> str:
    if "dense" not in runs:
        return f"{task}: the dense run is missing."
    good = [name for name in runs if name != "dense" and _fits(runs, name)]
    return (
        f"{task}, AdamW with {EVERY} local steps: {listed(good)} "
        f"{'sends' if len(good) < 2 else 'send'} at most 1/{TARGET_BYTES} of the dense bytes with "
        f"a test loss within {100 * TARGET_LOSS:g} % of dense AdamW's, the lowest and the last."
    )


def _fits(runs: Runs, name: str) -> bool:
    last, lowest = gaps(runs, name), lowest_gaps(runs, name)
    close = bool(last) and max(mean(last), mean(lowest)) <= TARGET_LOSS
    return close and saving(runs, name) >= TARGET_BYTES


STUDY = Study(
    name="local-steps",
    title="What it costs to exchange weights every 30 steps",
    figures="Douillard et al. (2023), Sarfi et al. (2025)",
    cells=cells,
    measure=measure,
    page=page,
    files=("shakespeare",),
)
