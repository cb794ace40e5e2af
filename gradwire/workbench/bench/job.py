"""The settings of one `bench step`, checked before any rank starts."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from gradwire.compress import METHODS
from gradwire.config import Config, configure
from gradwire.errors import ConfigError, unknown
from gradwire.workbench.models import MODELS, model_spec

POWERSGD = ("powersgd-1", "powersgd-2", "powersgd-4", "powersgd-8")
BASELINES = ("noop", "barrier", "dense", "bf16", *POWERSGD)
"""Methods of PyTorch, without gradwire.

`noop` sends nothing. `dense` is DDP without a hook. `barrier` is noop, and the ranks wait for each
other once per step.
"""

DTYPES = ("fp32", "bf16")

COPIES = 3
"""Copies of the model in fp32 that each method needs: DDP's buckets, the residual, the mean."""


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
        for name in ("batch", "iterations"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.autocast not in DTYPES:
            raise unknown("autocast", self.autocast, DTYPES)

    def config(self, name: str) -> Config | None:
        """Return gradwire's configuration for the method `name`; None for a method of PyTorch.

        `topk/union` names method and exchange. Fields of Config may follow:
        `topk:bundle_mb=100:values=fp32`.
        """
        if name in BASELINES:
            return None
        method, *fields = name.split(":")
        if method.partition("/")[0] not in METHODS:
            raise unknown("method", name.partition("/")[0], [*BASELINES, *METHODS])
        values = "fp32" if "/dense" in method else self.values
        settings: dict[str, Any] = {
            "values": values,
            "indices": self.indices,
            "density": self.density,
        }
        for text in fields:
            key, equals, value = text.partition("=")
            if not equals:
                raise ConfigError(f"method {name!r}: {text!r} must be FIELD=VALUE")
            settings[key] = _parse_value(value)
        return configure(None, {"method": method, **settings})

    @property
    def memory(self) -> int:
        """Bytes of a rank: its parameters and gradients, and the buffers of every method."""
        return 4 * model_spec(self.model).parameters * (2 + COPIES * len(self.methods))

    def to_json(self) -> str:
        """Return the job as text, for the processes of the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        """Return the job that `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "methods": tuple(fields["methods"])})


def _parse_value(text: str) -> Any:
    """Return a number, True or False if the text reads as one; otherwise the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
