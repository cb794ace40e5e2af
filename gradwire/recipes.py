"""Named recipes: settings that were measured together, and their demands on the optimiser."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradwire.accumulate.schedule import PAPER_WARMUP
from gradwire.errors import ConfigError, unknown


@dataclass(frozen=True)
class Recipe:
    """Recipe of Config fields, with the settings that SGD needs beside them.

    fields: fields of Config. A warm-up lasts one epoch at each density; the run sets
    `warmup_steps`.
    without_momentum: True: SGD has no momentum, and there is no momentum correction either. The
    learning rate is then `lr_scale` * lr / (1 - momentum): `lr_scale` times the rate that goes as
    far as momentum did.
    lr_scale: the factor on that learning rate.
    decay_scale: the factor on SGD's weight decay.
    """

    summary: str
    fields: Mapping[str, Any]
    without_momentum: bool = False
    lr_scale: float = 1.0
    decay_scale: float = 1.0

    def fields_without(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that `chosen` leaves open; its `method` may name the exchange too."""
        names = {*chosen, *(["exchange"] if "/" in str(chosen.get("method", "")) else [])}
        return {name: value for name, value in self.fields.items() if name not in names}

    def lr_factor(self, momentum: float) -> float:
        """Return the factor on the learning rate of SGD with this momentum."""
        return self.lr_scale / (1 - momentum) if self.without_momentum else 1.0


RECIPES: dict[str, Recipe] = {
    # Lin et al. (2018), with exact top-k in place of their sampling. SGD's weight decay is divided
    # by 1 - momentum: 10 times for a momentum of 0.9.
    "dgc": Recipe(
        "Deep Gradient Compression; SGD has no momentum and 10 times the weight decay.",
        {"method": "topk", "density": 0.001, "warmup": PAPER_WARMUP, "momentum": 0.9},
    ),
    # Ours, for networks with batch norm. benchmarks/results/accuracy_202611.md has its accuracy
    # beside dense training. 15 times the rate is for a momentum of 0.9.
    "plain-union": Recipe(
        "dense accuracy with 0.2 %; SGD has no momentum, 15 times its rate, 3 times its decay.",
        {
            "method": "topk",
            "exchange": "union",
            "density": 0.002,
            "values": "bf16",
            "indices": "packed",
        },
        without_momentum=True,
        lr_scale=1.5,
        decay_scale=3.0,
    ),
}


_MUON: dict[str, Any] = {
    "method": "topk",
    "values": "sign",
    "indices": "auto",
    "outer": "nesterov",
    "outer_lr": 1.0,
    "outer_momentum": 0.5,
    "keep_unsent": True,
}

LOCAL_RECIPES: dict[str, Recipe] = {
    # Bytes are those of four workers, against a ring all-reduce of fp32 at every inner step.
    "muon": Recipe(
        "language models with Muon inside: half of all entries as one bit, 51 times fewer bytes.",
        {"every": 5, "density": 0.5} | _MUON,
    ),
    "muon-wan": Recipe(
        "language models with Muon inside: a sixth as one bit, 510 times fewer bytes.",
        {"every": 30, "density": 1 / 6} | _MUON,
    ),
}
"""Recipes of `gradwire.local_steps`: fields of Config, and the arguments beside them."""


def find_recipe(name: Any) -> Recipe:
    """Return the recipe of that name for gradients; raise ConfigError if there is none."""
    if name in tuple(LOCAL_RECIPES):
        raise ConfigError(f"recipe {name!r} is for gradwire.local_steps, not for gradients")
    if name not in tuple(RECIPES):
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]


def find_local_recipe(name: Any) -> Recipe:
    """Return the recipe of that name for local steps; raise ConfigError if there is none."""
    if name in tuple(RECIPES):
        raise ConfigError(f"recipe {name!r} is for gradwire.attach, not for local steps")
    if name not in tuple(LOCAL_RECIPES):
        raise unknown("recipe", name, LOCAL_RECIPES)
    return LOCAL_RECIPES[name]
