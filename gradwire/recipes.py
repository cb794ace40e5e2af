"""Named recipes: fields of a Config that were measured together, and what they ask of SGD."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradwire.accumulate.schedule import PAPER
from gradwire.errors import unknown


@dataclass(frozen=True)
class Recipe:
    """`fields` are Config's; a warm-up among them has an epoch at each density, whose
    `warmup_steps` the run knows.

    `plain`: SGD has no momentum of its own and no momentum correction either, and instead `far`
    times the learning rate that goes as far as its momentum did; `decay`: times its weight decay.
    """

    summary: str
    fields: Mapping[str, Any]
    plain: bool = False
    far: float = 1.0
    decay: float = 1.0

    def beside(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Its fields but those that `given` has; the method there may name the exchange too."""
        taken = {*given, *(["exchange"] if "/" in str(given.get("method", "")) else [])}
        return {name: value for name, value in self.fields.items() if name not in taken}

    def lr(self, momentum: float) -> float:
        """How many times the learning rate of SGD with this momentum it takes."""
        return self.far / (1 - momentum) if self.plain else 1.0


RECIPES: dict[str, Recipe] = {
    "dgc": Recipe(
        "Deep Gradient Compression; SGD has no momentum and 10 times the weight decay.",
        {"method": "topk", "density": 0.001, "warmup": PAPER, "momentum": 0.9},
    ),
    "plain-union": Recipe(
        "dense accuracy with 0.2 %; SGD has no momentum, 15 times its rate, 3 times its decay.",
        {
            "method": "topk",
            "exchange": "union",
            "density": 0.002,
            "values": "bf16",
            "indices": "packed",
        },
        plain=True,
        far=1.5,
        decay=3.0,
    ),
}
"""dgc: Lin et al. (2018), with exact top-k where they sample; SGD's weight decay is then that of
before divided by 1 - momentum. plain-union: ours, for networks with batch norm; what it keeps of
dense accuracy is in benchmarks/results/accuracy_202611.md. 10 and 15 are for a momentum of 0.9."""


def recipe_of(name: Any) -> Recipe:
    """The recipe of that name."""
    if name not in tuple(RECIPES):
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]
