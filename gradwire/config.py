"""What to do, frozen: one Config a model."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradwire.accumulate.momentum import Correction
from gradwire.accumulate.schedule import PAPER, Schedule
from gradwire.compress import METHODS
from gradwire.encode import Encoding
from gradwire.errors import ConfigError, unknown
from gradwire.exchange import EXCHANGES


@dataclass(frozen=True)
class Config:
    """How gradients are compressed and exchanged.

    method, exchange: how a worker chooses and how workers agree; `method="topk/dense"` names both.
    density: the share of entries a worker sends, in (0, 1]; where workers share out k (micro,
        exdyna, deft), what they send together.
    values: how values travel: "fp32", "bf16", "fp16", "int8" or "int4"; what rounding takes away
        stays in the residual.
    indices: how indices travel: "int32", "packed" (12 bits each at density 0.001), "bitmap", or
        "auto", the smallest.
    options: the method's own options, e.g. {"shared": False} for randk.
    dense: patterns of parameter names that are never compressed, e.g. ("*.bias", "bn*").
    dense_steps: steps at the start that send everything.
    warmup, warmup_steps: then `warmup_steps` steps at each of these densities.
    momentum, nesterov: momentum correction, in place of the optimiser's momentum, which must then
        be 0. Takes another 4 bytes a parameter.
    masking: momentum ends where something was delivered (only with momentum).
    clip: the most that the L2 norm of the mean gradient should be; each worker clips its own at
        clip / sqrt(P), bundle by bundle. 0 is never.
    bundle_mb: fp32 gradient megabytes that are compressed and exchanged as one vector.
    dense_below: bundles of fewer entries are sent whole; the latency is the same.
    timeout: seconds until a collective that waits for a peer fails.
    """

    method: str = "topk"
    density: float = 0.001
    exchange: str = ""
    values: str = "fp32"
    indices: str = "int32"
    options: Mapping[str, Any] = field(default_factory=dict)
    dense: tuple[str, ...] = ()
    dense_steps: int = 0
    warmup: tuple[float, ...] = ()
    warmup_steps: int = 0
    momentum: float = 0.0
    nesterov: bool = False
    masking: bool = True
    clip: float = 0.0
    bundle_mb: float = 25.0
    dense_below: int = 1024
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        self._resolve_names()
        check_density(self.density)
        for density in self.warmup:
            check_density(density, "warmup")
        check_options(self.method, self.options)
        Encoding(self.values, self.indices)
        if self.indices == "common":
            raise ConfigError("indices='common' is chosen by methods that share their indices")
        if self.exchange == "union" and self.values not in ("fp32", "bf16"):
            raise ConfigError(
                f"exchange 'union' adds values on the way: fp32 or bf16, not {self.values!r}"
            )
        if self.exchange == "union" and self.options.get("unbiased"):
            raise ConfigError(
                "exchange 'union' adds the values of u itself, not the d/k times these that "
                "unbiased=True sends: use exchange='allgather'"
            )
        if self.exchange.startswith("dense") and self.values != "fp32":
            raise ConfigError(
                f"values={self.values!r} has no effect on exchange {self.exchange!r}; there are "
                f"'dense' (fp32) and 'dense-bf16'"
            )
        for name in ("dense_steps", "warmup_steps", "dense_below"):
            _check_whole(name, getattr(self, name))
        if self.warmup and not self.warmup_steps:
            raise ConfigError("warmup needs warmup_steps, the steps at each density; got 0")
        for name in ("bundle_mb", "timeout"):
            _check_positive(name, getattr(self, name))
        self._check_correction()

    def _check_correction(self) -> None:
        if not _is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise ConfigError(
                f"momentum must be in [0, 1), got {self.momentum!r}. It takes the place of the "
                f"optimiser's momentum, which must then be 0."
            )
        for name, default in (("nesterov", False), ("masking", True)):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigError(f"{name} must be True or False, got {value!r}")
            if value != default and not self.momentum:
                raise ConfigError(
                    f"{name}={value} has no effect without momentum: give e.g. momentum=0.9, and "
                    f"the optimiser none"
                )
        if not _is_number(self.clip) or not 0 <= self.clip < math.inf:
            raise ConfigError(
                f"clip must be a number of at least 0 (0 is never), got {self.clip!r}"
            )

    def _resolve_names(self) -> None:
        """`method="topk/dense"` is method and exchange; without an exchange there is a default."""
        method, _, exchange = str(self.method).partition("/")
        if exchange and self.exchange not in ("", exchange):
            raise ConfigError(
                f"method={self.method!r} names exchange {exchange!r}, exchange={self.exchange!r} "
                f"another: give one"
            )
        if method not in METHODS:
            raise unknown("method", method, METHODS)
        only = METHODS[method].exchange
        default = only or ("dense" if method == "dense" else "allgather")
        exchange = exchange or self.exchange or default
        if exchange not in EXCHANGES:
            raise unknown("exchange", exchange, EXCHANGES)
        if only and exchange != only:
            raise ConfigError(
                f"method {method!r} works with exchange {only!r} only, in which all agree on what "
                f"each chose in its part; got exchange={exchange!r}: leave it out"
            )
        dense = (self.dense,) if isinstance(self.dense, str) else tuple(self.dense)
        for name, value in [("method", method), ("exchange", exchange), ("dense", dense)]:
            object.__setattr__(self, name, value)
        object.__setattr__(self, "warmup", tuple(self.warmup))
        object.__setattr__(self, "options", dict(self.options))

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.density, self.dense_steps, self.warmup, self.warmup_steps)

    @property
    def correction(self) -> Correction:
        return Correction(self.momentum, self.nesterov, self.masking, self.clip)

    @property
    def encoding(self) -> Encoding:
        """How messages travel; without indices where the method makes them common."""
        common = METHODS[self.method].common(self.options)
        return Encoding(self.values, "common" if common else self.indices)

    def asdict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        out = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in out.items()}


RECIPES: dict[str, dict[str, Any]] = {
    "dgc": {"method": "topk", "density": 0.001, "warmup": PAPER, "momentum": 0.9},
}
"""Tested sets of fields. dgc: Lin et al. (2018), with exact top-k where they sample; it needs
`warmup_steps`, in the paper one epoch, and an optimiser without momentum."""


def configure(config: Config | None, fields: Mapping[str, Any]) -> Config:
    """`config` with `fields` on top; a field may also be an option of the method.

    `recipe`, a name in RECIPES, stands for a set of fields; those given beside it win.
    """
    known = {f.name for f in dataclasses.fields(Config)}
    if "recipe" in fields:
        recipe = fields["recipe"]
        if recipe not in RECIPES:
            raise unknown("recipe", recipe, RECIPES)
        fields = {**RECIPES[recipe], **{k: v for k, v in fields.items() if k != "recipe"}}
    base = config if config is not None else Config()
    if not isinstance(base, Config):
        raise ConfigError(f"config must be a gradwire.Config, got {type(base).__name__}")
    method = str(fields.get("method", base.method)).partition("/")[0]
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    options = METHODS[method].options
    for name in fields:
        if name not in known and name not in options:
            raise unknown("option", name, known | set(options) | {"recipe"})
    given = {k: v for k, v in fields.items() if k in known}
    extra = {k: v for k, v in fields.items() if k not in known}
    if extra:
        given["options"] = {**given.get("options", base.options), **extra}
    if "method" in given and "exchange" not in given:
        given["exchange"] = "" if config is None or "/" in given["method"] else base.exchange
    return dataclasses.replace(base, **given)


def check_density(value: Any, name: str = "density", use_k: bool = False) -> float:
    """`value` if it is a density; otherwise an error that says what to write."""
    number = _is_number(value)
    if number and not math.isnan(value) and 0 < value <= 1:
        return float(value)
    hint = "It is the share of entries that is sent; one in a hundred is 0.01."
    if number and value > 1 and value == int(value):
        if use_k:
            hint = f"For a fixed number of entries use k={int(value)}."
        elif value <= 100:
            hint = f"{value:g} % is {value / 100:g}."
    raise ConfigError(f"{name} must be in (0, 1], got {value!r}. {hint}")


def parse_options(method: str, texts: Sequence[str]) -> dict[str, Any]:
    """The method's options from "name=value" texts, each value of the type of its default."""
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    known = METHODS[method].options
    out: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"an option of a method is NAME=VALUE, got {text!r}")
        words = {"true": True, "false": False}
        kind = type(known.get(name, ""))
        try:
            out[name] = words[value.lower()] if kind is bool else kind(value)
        except (ValueError, KeyError):
            raise ConfigError(
                f"option {name} of {method} must be {kind.__name__}, got {value!r}"
            ) from None
    return out


def check_options(method: str, options: Mapping[str, Any]) -> None:
    """Raises for an option that the method does not have, or of another type."""
    known = METHODS[method].options
    for name, value in options.items():
        if name not in known:
            if not known:
                raise ConfigError(f"method {method!r} has no options, got {name!r}")
            raise unknown(f"option of {method}", name, known)
        wanted = type(known[name]).__name__
        if not isinstance(value, int | float if wanted == "float" else type(known[name])):
            raise ConfigError(f"option {name} of {method} must be {wanted}, got {value!r}")
    METHODS[method].check(options)


def _check_whole(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{name} must be a whole number of at least 0, got {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_positive(name: str, value: Any) -> None:
    if not _is_number(value) or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a number above 0, got {value!r}")
