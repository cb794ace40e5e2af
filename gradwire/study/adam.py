"""What error feedback does with AdamW: gradients that come late, in one piece, into its moments."""

from collections.abc import Sequence
from typing import Any

from gradwire.accumulate.schedule import PAPER
from gradwire.study.language import by_data, chart, follow, gap, options_of, table
from gradwire.study.study import Cell, Page, Row, Settings, Study

DENSITY = 0.01
STEPS, SMALL_STEPS = {"shakespeare": 900, "wikitext2": 600}, 120
TOPK: dict[str, Any] = {"method": "topk", "density": DENSITY}
RECIPES: dict[str, dict[str, Any]] = {
    "dense": {"method": "dense"},
    "topk": TOPK,
    "topk, union": TOPK | {"exchange": "union"},
    "topk, warm-up": TOPK | {"warmup": PAPER[:3], "warmup_steps": 30},
    "topk, momentum correction": TOPK | {"momentum_correction": True},
    "topk, beta2 0.999": TOPK | {"beta2": 0.999},
    "topk, eps 1e-5": TOPK | {"eps": 1e-5},
    "topk, lr x 2": TOPK | {"lr": 2e-3},
}
"""Options of `gradwire train`; momentum correction takes the place of beta1."""

FIRST: dict[str, Any] = {"every": 1, "outer": "average", "values": "fp32", "indices": "int32"}
LOCAL = {"AdamW first, then topk": FIRST | TOPK}
"""Arguments of `local_steps`: AdamW runs on each worker's own gradient, its step is compressed."""

TUNED = ("topk, beta2 0.999", "topk, eps 1e-5", "topk, lr x 2")
"""Not measured on WikiText-2."""


def cells(settings: Settings) -> list[Cell]:
    """A training run each."""
    names = ("phrases",) if settings.small else tuple(STEPS)
    return [
        {"data": name, "recipe": recipe, "seed": settings.seed}
        for name in names
        for recipe in (*RECIPES, *LOCAL)
        if name != "wikitext2" or recipe not in TUNED
    ]


def measure(settings: Settings, cell: Cell) -> list[Row]:
    """A row a look."""
    local = LOCAL.get(cell["recipe"])
    given = {"method": "dense"} if local else RECIPES[cell["recipe"]]
    steps = SMALL_STEPS if settings.small else STEPS[cell["data"]]
    return follow(settings, cell, options_of(settings, cell, **given), steps, local)


def page(rows: Sequence[Row]) -> Page:
    """Which recipe keeps dense AdamW's loss."""
    found = by_data(rows)
    says = " ".join(_says(name, runs) for name, runs in found.items())
    tables = [table(name, runs) for name, runs in found.items()]
    return Page(says, tables, [chart("adam", name, runs) for name, runs in found.items()])


def _says(name: str, runs: dict[str, list[Row]]) -> str:
    gaps = {r: apart for r in runs if r != "dense" and (apart := gap(runs, r)) is not None}
    if not gaps:
        return f"{name} has no pair of runs yet."
    order = sorted(gaps, key=gaps.__getitem__)
    ends = [f"{recipe} ({100 * gaps[recipe]:+.1f} %)" for recipe in (order[0], order[-1])]
    return (
        f"{name}, k = {DENSITY:g} d: {ends[0]} comes closest to dense AdamW, {ends[1]} stays "
        "farthest."
    )


STUDY = Study(
    name="adam",
    title="What error feedback does with AdamW",
    figures="ours: a small GPT",
    cells=cells,
    measure=measure,
    page=page,
    files=("shakespeare", "wikitext2"),
)
