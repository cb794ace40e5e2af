"""Arguments of `local_steps`: a recipe, the outer step and a Config out of what the user gave."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from gradwire.config import Config, configure
from gradwire.errors import ConfigError, unknown
from gradwire.recipes import find_local_recipe

_OUTER = {"nesterov": (1.0, 0.5), "average": (1.0, 0.0)}
"""Outer learning rate and momentum. DiLoCo (Douillard et al. 2023) uses 0.7 and 0.9 with Nesterov
and sends differences whole. Here entries arrive late, which already acts like momentum."""

_DEFAULTS = {"method": "chunked", "density": 0.05, "values": "int4", "indices": "packed"}
"""Fields of Config for which local steps have other defaults."""


@dataclass(frozen=True)
class Arguments:
    """Settings of local steps, after defaults and recipe.

    rule: the outer learning rate and the outer momentum.
    overlap: inner steps that an exchange has before its update lands; 0 waits for it.
    fragments: parts of the model that take turns.
    offload: keep x and outer momentum in the host's memory.
    """

    every: int
    rule: tuple[float, float]
    keep_unsent: bool
    config: Config
    recipe: str = ""
    overlap: int = 0
    fragments: int = 1
    offload: bool = False

    def __str__(self) -> str:
        lr, momentum = self.rule
        config = self.config
        words = f"every={self.every}, method={config.method!r}, density={config.density:.4g}, "
        words += f"values={config.values!r}, indices={config.indices!r}, "
        words += f"outer_lr={lr:g}, outer_momentum={momentum:g}, keep_unsent={self.keep_unsent}"
        if config.decay != 1:
            words += f", decay={config.decay:g}"
        if self.overlap:
            words += f", overlap={self.overlap}"
        if self.fragments > 1:
            words += f", fragments={self.fragments}"
        if self.offload:
            words += ", offload=True"
        return f"recipe {self.recipe!r} stands for {words}"


def read_arguments(config: Config | None, given: Mapping[str, Any]) -> Arguments:
    """Return the settings; `given` holds the arguments that are not None, and fields of Config."""
    name = given.get("recipe", "")
    if not name:
        return _resolve(config, {} if config else _DEFAULTS, given)
    recipe = find_local_recipe(name)
    try:
        arguments = _resolve(config, recipe.fields_without(given), given)
        if arguments.config.density == 1:
            raise ConfigError("density=1 sends all entries in fp32, which no recipe is for")
    except ConfigError as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in recipe.fields.items())
        raise ConfigError(f"recipe {name!r} ({shown}): {error}") from None
    return arguments


def _resolve(
    config: Config | None, usual: Mapping[str, Any], given: Mapping[str, Any]
) -> Arguments:
    fields = {**usual, **given}
    every = fields.pop("every", None)
    if every is None:
        raise ConfigError("local_steps needs every, the inner steps of a round, or a recipe")
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ConfigError(f"every must be a whole number of at least 1, got {every!r}")
    overlap, fragments = _read_turns(fields, every)
    rule = _read_rule(fields, given)
    keep_unsent = bool(fields.pop("keep_unsent", False))
    recipe, offload = fields.pop("recipe", ""), fields.pop("offload", False)
    if not isinstance(offload, bool):
        raise ConfigError(f"offload must be True or False, got {offload!r}")
    config = configure(config, fields)
    return Arguments(every, rule, keep_unsent, config, recipe, overlap, fragments, offload)


def _read_turns(fields: dict[str, Any], every: int) -> tuple[int, int]:
    """Take `overlap` and `fragments` out of `fields`, and return them."""
    overlap, fragments = fields.pop("overlap", 0), fields.pop("fragments", 1)
    if not isinstance(overlap, int) or isinstance(overlap, bool) or overlap < 0:
        raise ConfigError(f"overlap must be a whole number of steps, got {overlap!r}; 0 waits")
    if overlap >= every:
        raise ConfigError(
            f"overlap={overlap} is not below every={every}: an update must land before the next "
            f"difference is taken"
        )
    if not isinstance(fragments, int) or isinstance(fragments, bool) or fragments < 1:
        raise ConfigError(f"fragments must be a whole number of at least 1, got {fragments!r}")
    if fragments > every:
        raise ConfigError(
            f"fragments={fragments} is above every={every}: each needs a step of its own"
        )
    return overlap, fragments


def _read_rule(fields: dict[str, Any], given: Mapping[str, Any]) -> tuple[float, float]:
    """Take the outer step out of `fields`, and return its rate and momentum."""
    outer = fields.pop("outer", "nesterov")
    if outer not in _OUTER:
        raise unknown("outer", outer, _OUTER)
    lr, momentum = (fields.pop(name, None) for name in ("outer_lr", "outer_momentum"))
    # An outer that the user names wins over a recipe's numbers, and the user's numbers over both.
    if "outer" in given:
        lr, momentum = given.get("outer_lr"), given.get("outer_momentum")
    lr = _OUTER[outer][0] if lr is None else lr
    momentum = _OUTER[outer][1] if momentum is None else momentum
    if not 0 < lr <= 10:
        raise ConfigError(f"outer_lr must be in (0, 10], got {lr!r}; 1 applies the mean as it is")
    if not 0 <= momentum < 1:
        raise ConfigError(f"outer_momentum must be in [0, 1), got {momentum!r}")
    if outer == "average" and momentum:
        raise ConfigError(f"outer='average' has no momentum, got {momentum!r}: outer='nesterov'")
    return float(lr), float(momentum)


def warn_without_muon(name: str, optimizers: Sequence[Optimizer]) -> None:
    """Warn in one line if a recipe for Muon meets only optimisers that are like Adam."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if all("betas" in group for group in groups):
        kinds = " and ".join(sorted({type(optimizer).__name__ for optimizer in optimizers}))
        warnings.warn(
            f"recipe {name!r} is for Muon inside, and with {kinds} its loss stays above that of "
            f"dense AdamW: use optimizer = gradwire.optim.muon(model, lr=...)",
            stacklevel=3,
        )
