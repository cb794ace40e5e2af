"""The choices of `study language`: what the command line names, and the cells it stands for."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gradwire.errors import ConfigError, unknown
from gradwire.workbench import models
from gradwire.workbench.simulate.language_run import LanguageRecipe
from gradwire.workbench.study.language.recipes import RATES, RECIPES, first_rates
from gradwire.workbench.study.study import Cell, Settings

SIZES: dict[str, dict[str, int]] = {
    "gpt-tiny": {"tokens": 4_096, "steps": 700},
    "gpt-11m": {"tokens": 65_536, "steps": 1_500},
    "gpt-40m": {"tokens": 65_536, "steps": 1_000},
    "gpt-85m": {"tokens": 65_536, "steps": 1_900},
    "gpt-124m": {"tokens": 65_536, "steps": 1_900},
}
"""Tokens per step, of all workers together, and steps: one pass over the books at most."""

SMALL_CELLS = {"model": "gpt-tiny", "steps": 150, "recipe": "dense-adamw,dense-muon,muon"}
"""The choices of `--small`."""

FREE: dict[str, Callable[[str], Any]] = {
    "model": str,
    "width": int,
    "depth": int,
    "vocabulary": int,
    "workers": int,
    "tokens": int,
    "steps": int,
    "recipe": str,
    "every": int,
    "exchange": str,
    "values": str,
    "back": str,
    "density": float,
    "outer_lr": float,
    "outer_momentum": float,
    "decay": float,
    "lr": float,
}
"""The choices of the command line, each a value or a list with commas."""
CHANGES = ("exchange", "values", "back", "density", "outer_lr", "outer_momentum", "decay")
"""Choices that change a recipe. A cell names them only where they differ from the recipe."""
OUTER = ("outer_lr", "outer_momentum")
"""Changes that only recipes with rounds have."""
LINE = ("data", *(name for name in FREE if name != "lr"))
"""Columns that runs have in common if only their rates and seeds differ."""
MAY_BE_ZERO = ("vocabulary", "outer_momentum")


def list_cells(settings: Settings) -> list[Cell]:
    """List a cell per run: the grid of the study, or every combination of the choices.

    With `extend` only the first seed is listed, at the given rates or at three around a guess.
    """
    lists = _lists(settings)
    count = 1 if settings.extend else settings.seeds or 1
    cells = [
        _cell(dict(zip(lists, values, strict=True)), lr, seed, settings.small)
        for seed in range(settings.seed, settings.seed + count)
        for values in itertools.product(*lists.values())
        for lr in _rates(dict(zip(lists, values, strict=True)), settings)
    ]
    return list({str(cell): cell for cell in cells}.values())


def _lists(settings: Settings) -> dict[str, list[Any]]:
    """Return the values of each choice, with the study's own where none were given."""
    chosen: dict[str, Any] = dict(SMALL_CELLS) if settings.small else {}
    chosen |= settings.chosen
    lists = {name: _read(name, str(value)) for name, value in chosen.items()}
    lists.setdefault("model", ["gpt-11m"])
    lists.setdefault("recipe", list(RECIPES))
    lists.setdefault("workers", [4])
    return lists


def _read(name: str, text: str) -> list[Any]:
    """Return the values of a choice, "0.004,0.008" for instance."""
    tables: dict[str, Mapping[str, Any]] = {"model": SIZES, "recipe": RECIPES}
    known = tables.get(name)
    flag = f"--{name.replace('_', '-')}"
    values = []
    for part in text.split(","):
        try:
            value = FREE[name](part.strip())
        except ValueError as error:
            raise ConfigError(f"{flag} takes numbers, got {part!r}.") from error
        if known is not None and value not in known:
            raise unknown(name, value, known)
        is_low = not isinstance(value, str) and value <= 0
        if is_low and not (name in MAY_BE_ZERO and value == 0):
            raise ConfigError(f"{flag} must be above 0, got {part}.")
        values.append(value)
    return values


def _rates(chosen: Mapping[str, Any], settings: Settings) -> Sequence[float]:
    """Return the learning rates of a combination, one for `--small`."""
    if "lr" in chosen:
        return (chosen["lr"],)
    recipe = RECIPES[chosen["recipe"]]
    rates = RATES[recipe.optimizer]
    if settings.small:
        return rates[2:3]
    return first_rates(recipe, chosen["model"]) if settings.extend else rates


def _cell(chosen: Mapping[str, Any], lr: float, seed: int, small: bool) -> Cell:
    """Return the whole cell of the choices, with the defaults of the model."""
    spec = models.model_spec(chosen["model"]).make.keywords  # type: ignore[attr-defined]
    recipe = RECIPES[chosen["recipe"]]
    cell = {"model": chosen["model"], "data": "novels" if small else "books"}
    if chosen.get("vocabulary"):
        cell["vocabulary"] = chosen["vocabulary"]
    for name in ("width", "depth"):
        cell[name] = chosen.get(name, spec[name])
    cell["workers"] = chosen["workers"]
    for name in ("tokens", "steps"):
        cell[name] = chosen.get(name, SIZES[chosen["model"]][name])
    every = recipe.rounds.get("every", 1)
    cell |= {"recipe": chosen["recipe"], "every": chosen.get("every", every)}
    if not recipe.rounds:
        cell["every"] = 1
    changes = [name for name in CHANGES if name in chosen and _differs(recipe, name, chosen)]
    cell |= {name: chosen[name] for name in changes}
    return cell | {"lr": lr, "seed": seed}


def _differs(recipe: LanguageRecipe, name: str, chosen: Mapping[str, Any]) -> bool:
    """Return True if the choice changes the recipe; a dense baseline has nothing to change."""
    fields = recipe.rounds or recipe.gradients
    is_baseline = not recipe.rounds and fields.get("method", "dense") == "dense"
    if is_baseline or (name in OUTER and not recipe.rounds):
        return False
    if recipe.part is not None and name not in fields:
        # A rival has its own options, which are not those of the library.
        return False
    usual = {"decay": 1.0, **fields, **fields.get("options", {})}
    return bool(usual.get(name) != chosen[name])


def changes_of(cell: Cell) -> dict[str, Any]:
    """Return what the cell changes in its recipe, `every` included."""
    recipe = RECIPES[cell["recipe"]]
    changes = {name: cell[name] for name in CHANGES if name in cell}
    if recipe.rounds and cell["every"] != recipe.rounds["every"]:
        changes = {"every": cell["every"], **changes}
    return changes


def cell_recipe(cell: Cell) -> LanguageRecipe:
    """Return the cell's recipe, with its changes."""
    recipe, changes = RECIPES[cell["recipe"]], changes_of(cell)
    if not changes:
        return recipe
    fields = dict(recipe.rounds or recipe.gradients)
    if "back" in changes:
        # Only owners send anything back.
        changes.setdefault("exchange", "owner")
    if changes.get("exchange", fields.get("exchange")) != fields.get("exchange"):
        # Options are of the exchange that the recipe had.
        fields.pop("options", None)
    if "back" in changes:
        fields["options"] = {**fields.get("options", {}), "back": changes.pop("back")}
    fields |= changes
    return replace(recipe, rounds=fields) if recipe.rounds else replace(recipe, gradients=fields)
