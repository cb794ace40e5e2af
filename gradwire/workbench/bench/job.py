"""The settings of one `bench step`, checked before any rank starts."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradwire.compress import METHODS
from gradwire.config import Config, configure
from gradwire.errors import ConfigError, unknown
from gradwire.integrate.local_steps.arguments import Arguments, read_arguments
from gradwire.recipes import LOCAL_RECIPES
from gradwire.workbench.models import MODELS, model_spec

POWERSGD = ("powersgd-1", "powersgd-2", "powersgd-4", "powersgd-8")
BASELINES = ("noop", "barrier", "dense", "bf16", *POWERSGD)
"""Methods of PyTorch, without gradwire.

`noop` sends nothing. `dense` is DDP without a hook. `barrier` is noop, and the ranks wait for each
other once per step.
"""

NEVER = "never"
"""Local steps that never exchange: the optimiser of the recipes on the plain model."""

DTYPES = ("fp32", "bf16")
OPTIMIZERS = ("sgd", "adamw", "muon")

COPIES = 3
"""Copies of the model in fp32 that each method needs: DDP's buckets, the residual, the mean."""
LOCAL_COPIES = 6
"""The same for local steps: x, outer momentum, residual, difference, update, its own weights."""
MOMENTS = 2
"""Copies of the model that the moments of AdamW or Muon take at most."""


@dataclass(frozen=True)
class Job:
    """Training steps of `model` on every rank, by each of `methods` in turn.

    batch: examples per rank. autocast: "bf16", or "fp32" for none. seconds: once the timed steps of
    a method have taken this long, the method takes part in no further round; 0 is no limit.
    bucket_mb: the size of DDP's buckets, 0 for DDP's default. trace: a folder for timelines, or "".
    alone: True also measures each method without a network, for the planner's check.
    link: the lab's link, such as "1gbit", or "". rate and measured: its bits per second, as set and
    as measured. delay: the latency in seconds that the lab adds; latency: the measured one.
    at_most: no round begins after this many seconds, and no method is made ready after half of
    them; 0 is no limit.
    optimizer: steps with averaged gradients. Local steps have Muon, as their recipes say.
    islands: the number of islands of ranks with fast links inside, 0 for none. Local steps then
    have DDP inside, and exchange between them.
    """

    model: str
    methods: tuple[str, ...]
    batch: int = 32
    iterations: int = 50
    density: float = 0.001
    values: str = "bf16"
    indices: str = "packed"
    autocast: str = "fp32"
    device: str = "cpu"
    seconds: float = 0.0
    bucket_mb: float = 0.0
    link: str = ""
    rate: float = 0.0
    measured: float = 0.0
    trace: str = ""
    alone: bool = False
    delay: float = 0.0
    at_most: float = 0.0
    latency: float | None = None
    optimizer: str = "sgd"
    islands: int = 0

    def __post_init__(self) -> None:
        if model_spec(self.model).task == "speech":
            usable = sorted(name for name, m in MODELS.items() if m.task != "speech")
            raise ConfigError(
                f"model {self.model!r} learns from sound, for which there is no synthetic input. "
                f"Use one of: {', '.join(usable)}"
            )
        if not self.methods:
            raise ConfigError("nothing to measure: name at least one method")
        if self.methods[0] != "noop":
            raise ConfigError(
                f"methods must begin with noop, what all others are compared with, got "
                f"{','.join(self.methods)!r}"
            )
        for name in self.methods:
            self.config(name)
        if any(map(self.local_fields, self.methods)) and NEVER not in self.methods:
            raise ConfigError("local steps are compared with never: name it among the methods too")
        for name in ("batch", "iterations"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.autocast not in DTYPES:
            raise unknown("autocast", self.autocast, DTYPES)
        if self.optimizer not in OPTIMIZERS:
            raise unknown("optimizer", self.optimizer, OPTIMIZERS)
        if self.islands < 0 or self.islands == 1:
            raise ConfigError(f"islands must be at least 2, got {self.islands}; 0 is none")

    def local_fields(self, name: str) -> dict[str, Any]:
        """Return the arguments of `local_steps` for a method such as `muon:overlap=3`, else {}.

        `muon/owner` names the exchange too.
        """
        method, *fields = name.split(":")
        recipe, _, exchange = method.partition("/")
        if recipe not in LOCAL_RECIPES:
            return {}
        named = {"exchange": exchange} if exchange else {}
        return {"recipe": recipe, **named, **_read_fields(name, fields)}

    def rounds(self, name: str) -> Arguments | None:
        """Return the settings of a method with local steps, None for any other."""
        fields = self.local_fields(name)
        return read_arguments(None, fields) if fields else None

    def is_local(self, name: str) -> bool:
        """Return True for methods of which ranks train on their own, `never` among them."""
        return name == NEVER or bool(self.local_fields(name))

    def config(self, name: str) -> Config | None:
        """Return gradwire's configuration for the method `name`; None for one without gradwire.

        `topk/union` names method and exchange. Fields of Config may follow:
        `topk:bundle_mb=100:values=fp32`. A recipe of local steps takes their arguments too.
        """
        if name in BASELINES or name == NEVER:
            return None
        if (local := self.rounds(name)) is not None:
            return local.config
        method, *fields = name.split(":")
        if method.partition("/")[0] not in METHODS:
            known = [*BASELINES, NEVER, *LOCAL_RECIPES, *METHODS]
            raise unknown("method", name.partition("/")[0], known)
        values = "fp32" if "/dense" in method else self.values
        settings: dict[str, Any] = {
            "values": values,
            "indices": self.indices,
            "density": self.density,
        }
        settings |= _read_fields(name, fields)
        return configure(None, {"method": method, **settings})

    @property
    def memory(self) -> int:
        """Bytes of a rank: its parameters and gradients, and the buffers of every method."""
        local = list(filter(self.is_local, self.methods))
        copies = 2 + COPIES * (len(self.methods) - len(local))
        copies += LOCAL_COPIES * sum(name != NEVER for name in local) + (NEVER in local)
        copies += MOMENTS * ((self.optimizer != "sgd") + bool(local))
        return 4 * model_spec(self.model).parameters * copies

    def to_json(self) -> str:
        """Return the job as text, for the processes of the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        """Return the job that `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "methods": tuple(fields["methods"])})


def split_methods(text: str) -> tuple[str, ...]:
    """Return the methods in a list with commas.

    Fields may be separated by commas too: `noop,muon:exchange=owner,back=int4,topk` has three.
    """
    methods: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        is_field = "=" in part.partition(":")[0]
        if is_field and methods:
            methods[-1] += f":{part}"
        elif part:
            methods.append(part)
    return tuple(methods)


def _read_fields(name: str, fields: Sequence[str]) -> dict[str, Any]:
    """Return the values of texts FIELD=VALUE; `name` is the method, for the error."""
    out = {}
    for text in fields:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"method {name!r}: {text!r} must be FIELD=VALUE")
        out[key] = _parse_value(value)
    return out


def _parse_value(text: str) -> Any:
    """Return a number, True or False if the text reads as one; otherwise the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
