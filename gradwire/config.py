"""Config: the frozen settings of compression and exchange, one per model."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gradwire.accumulate.momentum import Correction
from gradwire.accumulate.schedule import Schedule
from gradwire.compress import METHODS, BoundMethod
from gradwire.encode import Encoding
from gradwire.errors import ConfigError
from gradwire.exchange import EXCHANGES
from gradwire.recipes import find_recipe
from gradwire.registry import check_options, no_option_error, options_of, resolve_names


# The help of the command line takes its text on each field from this docstring.
@dataclass(frozen=True)
class Config:
    """Settings for how gradients are compressed and exchanged.

    method: how a worker chooses the entries to send; "topk/dense" names the exchange too.
    density: the share of entries that a worker sends, in (0, 1]. For methods that divide k among
        the workers (micro, exdyna, deft): the share that all workers send together.
    exchange: how workers agree on the mean. Without a name: the exchange of the method.
    values: how values travel: "fp32", "bf16", "fp16", "int8", "int4", "two-bit" or "sign". The
        residual keeps the rounding error. With method "dense" and an exchange of messages
        ("allgather", "owner") all entries travel so, without indices.
    indices: how indices travel: "int32", "packed" (12 bits each at density 0.001), "local16",
        "bitmap", or "auto", the smallest.
    rounding: how bf16, int8 and int4 values are rounded: "nearest" or "stochastic".
    options: the options of the method and of the exchange by name, e.g. shared=True for randk or
        rows=3 for gs-sgd.
    dense: patterns of parameter names that are never compressed, e.g. *.bias or bn*.
    dense_steps: steps at the start that send everything.
    warmup: densities after `dense_steps` and before `density`, e.g. those of Deep Gradient
        Compression: 0.25, 0.0625, 0.015625 and 0.004.
    warmup_steps: steps at each density of `warmup`.
    momentum: momentum correction, in place of the optimiser's momentum, which must then be 0.
        Takes another 4 bytes a parameter.
    nesterov: Nesterov's momentum in place of the usual.
    masking: momentum ends at delivered entries (only with momentum correction).
    decay: the factor on the residual after every exchange, in (0, 1]. What it takes away is
        forgotten, and `stats().forgotten` counts it. 1 forgets nothing.
    clip: the largest L2 norm that the mean gradient should have, 0 for any. Each worker clips its
        own gradient at `clip` / sqrt(P), bundle by bundle.
    bundle_mb: the least fp32 gradient megabytes that are compressed and exchanged as one vector.
        None: 25; on CUDA 0.4 of the model, from 25 to 200 (see accumulate/layout.py).
    dense_below: bundles of fewer entries are sent whole, because the latency is the same.
    watch: steps between comparisons of a digest of the parameters, before the exchange. Replicas
        that differ are a DriftError on every rank. Waits for the device. 0 is never.
    timeout: seconds until a collective that waits for a peer fails, from 1 to 1e9.
    """

    method: str = "topk"
    density: float = 0.001
    exchange: str = ""
    values: str = "fp32"
    indices: str = "int32"
    rounding: str = "nearest"
    options: Mapping[str, Any] = field(default_factory=dict)
    dense: tuple[str, ...] = ()
    dense_steps: int = 0
    warmup: tuple[float, ...] = ()
    warmup_steps: int = 0
    momentum: float = 0.0
    nesterov: bool = False
    masking: bool = True
    decay: float = 1.0
    clip: float = 0.0
    bundle_mb: float | None = None
    dense_below: int = 1024
    watch: int = 0
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        self._resolve_names()
        check_density(self.density)
        for density in self.warmup:
            check_density(density, "warmup")
        check_options(self.options, self.method, self.exchange)
        Encoding(self.values, self.indices, self.rounding)
        if self.indices == "common":
            raise ConfigError("indices='common' is chosen by methods that share their indices")
        self._check_exchange()
        for name in ("dense_steps", "warmup_steps", "dense_below", "watch"):
            _check_whole(name, getattr(self, name))
        if self.warmup and not self.warmup_steps:
            raise ConfigError("warmup needs warmup_steps, the steps at each density; got 0")
        _check_timeout(self.timeout)
        if self.bundle_mb is not None:
            _check_positive("bundle_mb", self.bundle_mb)
        if not _is_number(self.decay) or not 0 < self.decay <= 1:
            raise ConfigError(f"decay must be in (0, 1], got {self.decay!r}; 1 forgets nothing")
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

    def _check_exchange(self) -> None:
        exchange = EXCHANGES[self.exchange]
        exchange.check_config(self)
        if self.rounding == "stochastic" and not exchange.stochastic:
            can = " and ".join(repr(name) for name, x in EXCHANGES.items() if x.stochastic)
            raise ConfigError(
                f"rounding='stochastic' is for exchanges {can}; "
                f"{self.exchange!r} rounds to the nearest"
            )

    def _resolve_names(self) -> None:
        method, exchange = resolve_names(self.method, self.exchange)
        dense = (self.dense,) if isinstance(self.dense, str) else _series(self.dense)
        if dense is None or not all(isinstance(pattern, str) for pattern in dense):
            raise ConfigError(
                f"dense must be patterns of parameter names, such as ('*.bias',), got "
                f"{self.dense!r}"
            )
        warmup = _series(self.warmup)
        if warmup is None:
            raise ConfigError(
                f"warmup must be several densities, such as (0.25, 0.0625), got {self.warmup!r}"
            )
        if not isinstance(self.options, Mapping):
            raise ConfigError(
                f"options must be a dict, such as {{'seed': 1}}, got {self.options!r}; {{}} is none"
            )
        for name, value in (
            ("method", method),
            ("exchange", exchange),
            ("dense", dense),
            ("warmup", warmup),
            ("options", dict(self.options)),
        ):
            object.__setattr__(self, name, value)

    # Cached, because every bundle reads these in every step.

    @cached_property
    def schedule(self) -> Schedule:
        return Schedule(self.density, self.dense_steps, self.warmup, self.warmup_steps)

    @cached_property
    def bound_method(self) -> BoundMethod:
        """The method with its options."""
        method = METHODS[self.method]
        return method.bind({k: v for k, v in self.options.items() if k in method.options})

    @cached_property
    def exchange_options(self) -> dict[str, Any]:
        """The entries of `options` that belong to the exchange."""
        return {k: v for k, v in self.options.items() if k in EXCHANGES[self.exchange].options}

    @cached_property
    def encodes_all(self) -> bool:
        """True: method dense with an exchange of messages. All entries travel, as `values`."""
        exchange = EXCHANGES[self.exchange]
        in_messages = not (exchange.whole or exchange.chooses)
        return self.method == "dense" and self.values != "fp32" and in_messages

    @cached_property
    def correction(self) -> Correction:
        return Correction(self.momentum, self.nesterov, self.masking, self.clip)

    @cached_property
    def encoding(self) -> Encoding:
        """The encoding of messages; without indices if all ranks choose the same ones."""
        indices = "common" if self.bound_method.is_common else self.indices
        return Encoding(self.values, indices, self.rounding)

    def __getstate__(self) -> dict[str, Any]:
        # Only the fields: the cached properties may hold functions that cannot be pickled.
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def asdict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        out = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in out.items()}


def configure(config: Config | None, fields: Mapping[str, Any]) -> Config:
    """Return `config` with `fields` in place of its own.

    A name in `fields` may also be an option of the method or of the exchange. `recipe`, a name in
    gradwire/recipes.py, stands for a set of fields; the other names in `fields` win over it.
    """
    known = {f.name for f in dataclasses.fields(Config)}
    base = config if config is not None else Config()
    if not isinstance(base, Config):
        raise ConfigError(f"config must be a gradwire.Config, got {type(base).__name__}")
    if "recipe" in fields:
        recipe = find_recipe(fields["recipe"]).fields_without(fields)
        if recipe.get("warmup") and not fields.get("warmup_steps", base.warmup_steps):
            raise ConfigError(
                f"recipe {fields['recipe']!r} needs warmup_steps, the steps at each density of its "
                f"warm-up: those of an epoch"
            )
        fields = recipe | {k: v for k, v in fields.items() if k != "recipe"}
    changes = {k: v for k, v in fields.items() if k in known}
    extra = {k: v for k, v in fields.items() if k not in known}
    if "method" in changes and "exchange" not in changes:
        changes["exchange"] = (
            "" if config is None or "/" in str(changes["method"]) else base.exchange
        )
    names = resolve_names(
        changes.get("method", base.method), changes.get("exchange", base.exchange)
    )
    for name in extra:
        if name not in options_of(*names):
            raise no_option_error(name, *names, {*known, "recipe"})
    options = changes.get("options", base.options)
    if extra and isinstance(options, Mapping):
        changes["options"] = {**options, **extra}
    return dataclasses.replace(base, **changes)


def check_density(value: Any, name: str = "density", use_k: bool = False) -> float:
    """Return `value` if it is a density; otherwise raise ConfigError with a hint.

    use_k: True: the caller also takes a number of entries, and the hint names it.
    """
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


def _check_whole(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{name} must be a whole number of at least 0, got {value!r}")


def _series(value: Any) -> tuple[Any, ...] | None:
    listed = isinstance(value, Iterable) and not isinstance(value, str | Mapping)
    return tuple(value) if listed else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_timeout(value: Any) -> None:
    # torch rounds to milliseconds, and its clocks end before 1e10 seconds.
    if not _is_number(value) or not 1 <= value <= 1e9:
        raise ConfigError(f"timeout must be seconds from 1 to 1e9, got {value!r}")


def _check_positive(name: str, value: Any) -> None:
    if not _is_number(value) or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a number above 0, got {value!r}")
