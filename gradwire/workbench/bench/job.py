"""What `bench step` is asked to do, checked before a rank starts, and one row of its answer."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from gradwire.compress import METHODS
from gradwire.config import Config, configure
from gradwire.errors import ConfigError, unknown
from gradwire.workbench.models import MODELS, model_spec

POWERSGD = ("powersgd-1", "powersgd-2", "powersgd-4", "powersgd-8")
BASELINES = ("noop", "barrier", "dense", "bf16", *POWERSGD)
"""PyTorch's own hooks; `noop` sends nothing, `dense` is DDP without a hook. `barrier` is noop, with
ranks that wait for each other once a step."""

DTYPES = ("fp32", "bf16")

COPIES = 3
"""Of the model's fp32 size, for each method: DDP's buckets, the residual, the mean."""


@dataclass(frozen=True)
class Job:
    """Training steps of `model` on every rank, by each of `methods` in turn.

    batch: examples a rank. autocast: fp32 is none. seconds: a method is dropped from the rounds
    that are left when its timed steps have taken this long; 0 is never. bucket_mb: DDP's buckets,
    0 as DDP has them. trace: a folder for timelines, or nothing. alone: also measure each method
    without a network, for the planner's check. delay: seconds of latency asked of the lab; latency:
    what is measured. at_most: no round begins after so many seconds, and no method is made ready
    after half of them; 0 is no limit.
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

    def __post_init__(self) -> None:
        known = model_spec(self.model)
        if known.task == "speech":
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
        for name in ("batch", "iterations"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.autocast not in DTYPES:
            raise unknown("autocast", self.autocast, DTYPES)

    def config(self, name: str) -> Config | None:
        """What gradwire does for `name`; None for one of PyTorch's own.

        `topk/union` names method and exchange; fields of Config may follow:
        `topk:bundle_mb=100:values=fp32`.
        """
        if name in BASELINES:
            return None
        method, *fields = name.split(":")
        if method.partition("/")[0] not in METHODS:
            raise unknown("method", name.partition("/")[0], [*BASELINES, *METHODS])
        values = "fp32" if "/dense" in method else self.values
        given: dict[str, Any] = {"values": values, "indices": self.indices, "density": self.density}
        for text in fields:
            key, equals, value = text.partition("=")
            if not equals:
                raise ConfigError(f"method {name!r}: {text!r} must be FIELD=VALUE")
            given[key] = _value(value)
        return configure(None, {"method": method, **given})

    @property
    def memory(self) -> int:
        """Bytes for a rank's parameters and gradients, and for what each method holds beside."""
        return 4 * model_spec(self.model).parameters * (2 + COPIES * len(self.methods))

    def json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> "Job":
        fields = json.loads(text)
        return cls(**{**fields, "methods": tuple(fields["methods"])})


def _value(text: str) -> Any:
    """A number, true or false where it reads as one; else the word itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
