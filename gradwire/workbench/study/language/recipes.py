"""The ways to train that `study language` compares, and the learning rates tried for each."""

from typing import Any

from gradwire.workbench.rivals import RIVAL_RATES, RIVALS
from gradwire.workbench.simulate.language_run import LanguageRecipe

HALF: dict[str, Any] = {"method": "topk", "density": 0.5, "values": "sign", "indices": "auto"}
"""Half of all entries as one bit each."""
SIXTH = HALF | {"density": 1 / 6}
WHOLE: dict[str, Any] = {"method": "dense", "values": "fp32", "indices": "int32"}
"""All entries in fp32."""
KEPT: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.5, "keep_unsent": True}
"""The outer step of ours: Nesterov, and a worker keeps in its weights what it has not sent."""
DILOCO: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9}
"""The outer step of Douillard et al. (2023)."""

RECIPES = {
    "dense-adamw": LanguageRecipe(
        "AdamW, all-reduce at every step", "adamw", gradients={"method": "dense"}
    ),
    "dense-muon": LanguageRecipe(
        "Muon, all-reduce at every step", "muon", gradients={"method": "dense"}
    ),
    "muon": LanguageRecipe(
        "Muon inside rounds of 5, half of all entries as sign",
        "muon",
        rounds={"every": 5} | HALF | KEPT,
    ),
    "muon-wan": LanguageRecipe(
        "Muon inside rounds of 30, a sixth of all entries as sign",
        "muon",
        rounds={"every": 30} | SIXTH | KEPT,
    ),
    "muon-5-whole": LanguageRecipe(
        "Muon inside rounds of 5, nothing compressed",
        "muon",
        rounds={"every": 5} | WHOLE | KEPT,
    ),
    "muloco": LanguageRecipe(
        "Muon inside rounds of 30, nothing compressed (MuLoCo's shape)",
        "muon",
        rounds={"every": 30} | WHOLE | KEPT,
    ),
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
