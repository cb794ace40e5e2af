"""What it costs to exchange weights every 30 steps instead of gradients at each."""

from collections.abc import Sequence
from typing import Any

from gradwire.study.language import by_data, chart, follow, gap, options_of, table
from gradwire.study.study import Cell, Page, Row, Settings, Study, listed

EVERY, STEPS, SMALL_STEPS = 30, 1500, 150
MEAN: dict[str, Any] = {"every": EVERY, "outer": "average"}
NESTEROV: dict[str, Any] = {"every": EVERY, "outer": "nesterov", "outer_lr": 1.0}
SPARSE: dict[str, Any] = {"density": 0.1, "indices": "auto"}
WHOLE: dict[str, Any] = {"method": "dense", "values": "fp32", "indices": "int32"}
RECIPES: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "10 %, Nesterov 0.5": SPARSE | NESTEROV | {"outer_momentum": 0.5},
    "5 %, Nesterov 0.5, flush": SPARSE
    | NESTEROV
    | {"outer_momentum": 0.5, "density": 0.05, "flush": True},
    "10 %, Nesterov 0.3": SPARSE | NESTEROV | {"outer_momentum": 0.3},
    "10 %, average": SPARSE | MEAN,
    "all, average": WHOLE | MEAN,
}
"""dense is AdamW with a dense all-reduce at every step; the others are local_steps' arguments,
and whether the last exchange sends what is left."""

TARGET_BYTES, TARGET_LOSS = 500, 0.02


def cells(settings: Settings) -> list[Cell]:
    """A training run each."""
    name = "phrases" if settings.small else "shakespeare"
    return [{"data": name, "recipe": recipe, "seed": settings.seed} for recipe in RECIPES]


def measure(settings: Settings, cell: Cell) -> list[Row]:
    """A row a look."""
    options = options_of(settings, cell, method="dense")
    steps = SMALL_STEPS if settings.small else STEPS
    return list(follow(settings, cell, options, steps, RECIPES[cell["recipe"]]))


def page(rows: Sequence[Row]) -> Page:
    """Who keeps dense AdamW's loss, and for how many bytes."""
    found = by_data(rows)
    says = " ".join(_says(runs) for runs in found.values())
    tables = [table(name, runs) for name, runs in found.items()]
    return Page(says, tables, [chart("local", name, runs) for name, runs in found.items()])


def _says(runs: dict[str, list[Row]]) -> str:
    if "dense" not in runs:
        return "The dense run is missing."
    good = [name for name in runs if name != "dense" and _fits(runs, name)]
    return (
        f"AdamW with {EVERY} local steps: {listed(good)} "
        f"{'sends' if len(good) < 2 else 'send'} at most 1/{TARGET_BYTES} of the dense bytes with "
        f"a test loss within {100 * TARGET_LOSS:g} % of dense AdamW's."
    )


def _fits(runs: dict[str, list[Row]], name: str) -> bool:
    last, apart = runs[name][-1], gap(runs, name)
    return (
        apart is not None and apart <= TARGET_LOSS and TARGET_BYTES * last["bytes"] <= last["dense"]
    )


STUDY = Study(
    name="local-steps",
    title="What it costs to exchange weights every 30 steps",
    figures="Douillard et al. (2023), Sarfi et al. (2025)",
    cells=cells,
    measure=measure,
    page=page,
    files=("shakespeare",),
)
