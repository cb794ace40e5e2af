"""The ways to train that `study language` compares, and the learning rates tried for each."""

from collections.abc import Mapping
from typing import Any

from gradwire.recipes import LOCAL_RECIPES
from gradwire.workbench import models
from gradwire.workbench.rivals import RIVAL_RATES, RIVALS
from gradwire.workbench.simulate.language_run import LanguageRecipe

HALF: dict[str, Any] = {"method": "topk", "density": 0.5, "values": "sign", "indices": "auto"}
"""Half of all entries as one bit each."""
SIXTH = HALF | {"density": 1 / 6}
TWO_BITS: dict[str, Any] = {"method": "dense", "values": "two-bit", "indices": "int32"}
"""All entries as two bits each."""
WHOLE: dict[str, Any] = {"method": "dense", "values": "fp32", "indices": "int32"}
"""All entries in fp32."""
KEPT: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.5, "keep_unsent": True}
"""The outer step of ours: Nesterov, and a worker keeps in its weights what it has not sent."""
LONG: dict[str, Any] = {"outer_lr": 0.9, "outer_momentum": 0.8, "keep_unsent": True}
"""More outer momentum, as MuLoCo has for eight workers."""
DILOCO: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9}
"""The outer step of Douillard et al. (2023)."""


def _owner(back: str) -> dict[str, Any]:
    """Return the fields of an exchange whose bytes do not grow with the workers."""
    return {"exchange": "owner", "options": {"back": back}}


def _muon(summary: str, every: int, *parts: Mapping[str, Any]) -> LanguageRecipe:
    """Return a recipe of rounds with Muon inside."""
    rounds: dict[str, Any] = {"every": every}
    for part in parts:
        rounds |= part
    return LanguageRecipe(f"Muon inside rounds of {every}, {summary}", "muon", rounds=rounds)


RECIPES = {
    "dense-adamw": LanguageRecipe(
        "AdamW, all-reduce at every step", "adamw", gradients={"method": "dense"}
    ),
    "dense-muon": LanguageRecipe(
        "Muon, all-reduce at every step", "muon", gradients={"method": "dense"}
    ),
    # The library's own, so that what is measured is what a user has.
    **{
        name: LanguageRecipe(recipe.summary, "muon", rounds=dict(recipe.fields))
        for name, recipe in LOCAL_RECIPES.items()
    },
    "muon-half-gather": _muon("half of all entries as sign", 5, HALF, KEPT),
    "muon-half-int4": _muon(
        "half of all entries as sign, int4 back", 5, HALF, _owner("int4"), KEPT
    ),
    "muon-two-int4": _muon("all entries as two bits, int4 back", 5, TWO_BITS, _owner("int4"), KEPT),
    "muon-sixth-gather": _muon("a sixth of all entries as sign", 30, SIXTH, KEPT),
    "muon-sixth-two": _muon(
        "a sixth of all entries as sign, two bits back", 30, SIXTH, _owner("two-bit"), LONG
    ),
    "muon-two-two": _muon("two bits both ways", 34, TWO_BITS, _owner("two-bit"), LONG),
    "muon-two-int4-49": _muon(
        "all entries as two bits, int4 back", 49, TWO_BITS, _owner("int4"), LONG
    ),
    "muon-whole": _muon("nothing compressed", 5, WHOLE, KEPT),
    "muon-whole-30": _muon("nothing compressed", 30, WHOLE, KEPT),
    "adamw-5": LanguageRecipe(
        "AdamW inside rounds of 5, half of all entries as sign",
        "adamw",
        rounds={"every": 5} | HALF | KEPT,
    ),
    "adamw-30": LanguageRecipe(
        "AdamW inside rounds of 30, a sixth of all entries as sign",
        "adamw",
        rounds={"every": 30} | SIXTH | KEPT,
    ),
    "diloco": LanguageRecipe(
        "AdamW inside rounds of 30, nothing compressed, outer Nesterov (0.7, 0.9)",
        "adamw",
        rounds={"every": 30} | WHOLE | DILOCO,
    ),
    "topk-adamw": LanguageRecipe(
        "top-k 1 % of the gradients in front of AdamW",
        "adamw",
        gradients={"method": "topk", "density": 0.01},
    ),
} | RIVALS
"""All recipes, by name."""

RATES = {
    "adamw": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
    "muon": (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
} | RIVAL_RATES
"""Learning rates of the grid, by the optimiser inside."""

MUON_RATE = 4.0
"""Muon's best learning rate over AdamW's, about, in every size that was measured."""


def first_rates(recipe: LanguageRecipe, model: str) -> tuple[float, ...]:
    """Return the three rates with which `--extend` begins: a guess and its two neighbours."""
    rate = models.model_spec(model).lr
    if recipe.optimizer == "muon":
        rate *= MUON_RATE
    elif recipe.optimizer != "adamw":
        # The middle of its grid, which is for gpt-11m.
        rates = RATES[recipe.optimizer]
        rate *= rates[len(rates) // 2] / models.model_spec("gpt-11m").lr
    elif recipe.rounds:
        rate /= 2
    return (rate / 2, rate, 2 * rate)


def next_rates(losses: Mapping[float, float]) -> list[float]:
    """Return the rates to try next: the neighbours that the best one lacks, at a factor of 2.

    losses: the loss of every rate so far. None are left if the best has a worse one on both sides.
    """
    best = min(losses, key=losses.__getitem__)
    has_lower = any(best / 2.01 <= rate < best for rate in losses)
    has_higher = any(best < rate <= best * 2.01 for rate in losses)
    return [best / 2] * (not has_lower) + [best * 2] * (not has_higher)
