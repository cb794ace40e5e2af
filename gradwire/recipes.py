"""Named recipes: fields of a Config that were measured together, and what they ask of SGD."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradwire.accumulate.schedule import PAPER
from gradwire.errors import unknown


@dataclass(frozen=True)
class Recipe:
    """`fields` are Config's; `warmup_steps` are not among them, for they depend on the run.

    `plain`: SGD has no momentum of its own and no momentum correction either, and instead `far`
    times the learning rate that goes as far as its momentum did; `decay`: times its weight decay.
    `early`: the share of the run that each density of the warm-up takes, 0 for an epoch.
    """

    summary: str
    fields: Mapping[str, Any]
    plain: bool = False
    far: float = 1.0
    decay: float = 1.0
    early: float = 0.0

    @property
    def when(self) -> str:
        """What `warmup_steps` should be."""
        return f"{self.early:g} of the run's steps" if self.early else "the steps of an epoch"

    def warmup_steps(self, epochs: int, epoch_steps: int) -> int:
        """Steps at each density of the warm-up."""
        share = self.early * epochs if self.early else 1.0
        return max(1, round(share * epoch_steps))

    def lr(self, momentum: float) -> float:
        """How many times the learning rate of SGD with this momentum it takes."""
        return self.far / (1 - momentum) if self.plain else 1.0


RECIPES: dict[str, Recipe] = {
    "dgc": Recipe(
        "Deep Gradient Compression; SGD has no momentum and 10 times the weight decay.",
        {"method": "topk", "density": 0.001, "warmup": PAPER, "momentum": 0.9},
    ),
    "plain-front": Recipe(
        "0.2 % in all; SGD has no momentum, 15 times its rate, 1.5 times its decay.",
        {"method": "topk", "density": 0.00155, "warmup": (0.006,)},
        plain=True,
        far=1.5,
        decay=1.5,
        early=0.1,
    ),
}
"""dgc: Lin et al. (2018), with exact top-k where they sample; SGD's weight decay is then that of
before divided by 1 - momentum. plain-front: ours, for networks with batch norm; what it keeps of
dense accuracy is in benchmarks/results/accuracy_202611.md. 10 and 15 are for a momentum of 0.9."""


def recipe_of(name: Any) -> Recipe:
    """The recipe of that name."""
    if name not in tuple(RECIPES):
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]
