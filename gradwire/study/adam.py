"""What error feedback does with AdamW: gradients that come late, in one piece, into its moments."""

from collections.abc import Sequence
from typing import Any

from gradwire.study.language import by_data, chart, follow, gap, options_of, table
from gradwire.study.study import Cell, Page, Row, Settings, Study

STEPS, SMALL_STEPS = {"shakespeare": 900, "wikitext2": 300}, 120
TOPK: dict[str, Any] = {"method": "topk", "density": 0.01}
INT4: dict[str, Any] = {"method": "topk", "density": 0.05, "values": "int4", "indices": "packed"}
RECIPES: dict[str, dict[str, Any]] = {
    "dense": {"method": "dense"},
    "topk": TOPK,
    "topk, union": TOPK | {"exchange": "union"},
    "topk, momentum correction": TOPK | {"momentum_correction": True},
    "topk, beta2 0.999": TOPK | {"beta2": 0.999},
    "topk, eps 1e-5": TOPK | {"eps": 1e-5},
    "topk 5 %, int4": INT4,
    "topk 5 %, int4, warm-up": INT4 | {"warmup": (0.25,), "warmup_steps": 90},
}
"""Options of `gradwire train`; momentum correction takes the place of beta1."""

LOCAL = {"AdamW first, 5 %, int4": INT4 | {"every": 1, "outer": "average"}}
"""Arguments of `local_steps`: AdamW runs on each worker's own gradient, its step is compressed."""

WORDS = ("dense", "topk 5 %, int4")
"""What is measured on WikiText-2."""


def cells(settings: Settings) -> list[Cell]:
    """A training run each."""
    names = ("phrases",) if settings.small else tuple(STEPS)
    return [
        {"data": name, "recipe": recipe, "seed": settings.seed}
        for name in names
        for recipe in (*RECIPES, *LOCAL)
        if name != "wikitext2" or recipe in WORDS
    ]


def measure(settings: Settings, cell: Cell) -> list[Row]:
    """A row a look."""
    local = LOCAL.get(cell["recipe"])
    given = {"method": "dense"} if local else RECIPES[cell["recipe"]]
    steps = SMALL_STEPS if settings.small else STEPS[cell["data"]]
    return list(follow(settings, cell, options_of(settings, cell, **given), steps, local))


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
