"""`wire.stats()` for the tools that watch a run: TensorBoard, Weights & Biases, Prometheus."""

import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from gradwire.errors import ConfigError
from gradwire.state.stats import Stats

METRICS: dict[str, tuple[str, str]] = {
    "steps": ("counter", "Steps taken."),
    "world_size": ("gauge", "Ranks."),
    "bytes_sent": ("counter", "Bytes that left this rank."),
    "bytes_dense": ("counter", "Bytes that a dense all-reduce would have sent."),
    "achieved_density": ("gauge", "Entries sent, over all entries."),
    "residual_norm": ("gauge", "L2 norm of the residual, which this rank keeps for later."),
    "value_error_db": ("gauge", "Energy that rounding the values took, in decibels."),
    "leaked": ("gauge", "Share of the chosen energy that the exchange lost."),
    "forgotten": ("gauge", "Share of the energy that decay took from residuals."),
    "skipped": ("counter", "Steps that the optimiser did not take."),
    "clipped": ("counter", "Times that the gradient of a bundle was clipped."),
    "length_exchanges": ("counter", "Times that ranks exchanged the lengths of their messages."),
    "bundles": ("gauge", "Bundles that the model was cut into."),
    "memory_bytes": ("gauge", "Bytes of memory that the bundles hold."),
    "dense": ("counter", "Times that a bundle was sent whole, by reason."),
    "seconds": ("counter", "Seconds in each stage."),
}
"""Fields of Stats -> (kind, help text). A counter only grows; a gauge goes up and down."""

_LABELS = {"dense": "reason", "seconds": "stage"}
"""Fields of Stats that hold several numbers -> the label that tells the numbers apart."""


def scalars(stats: Stats) -> dict[str, float]:
    """Return one number per name: gradwire/bytes_sent, ..., gradwire/seconds/compress.

    Fields without a number (None) are left out. The names never change.
    """
    return {
        f"gradwire/{field}/{key}" if key else f"gradwire/{field}": value
        for field, key, value in _samples(stats)
    }


def _samples(stats: Stats) -> Iterator[tuple[str, str, float]]:
    """Yield (field, key inside the field or "", value)."""
    for field in METRICS:
        value = getattr(stats, field)
        for key, number in value.items() if field in _LABELS else [("", value)]:
            if number is not None:
                yield field, key, float(number)


class Logger(Protocol):
    """Logger of numbers during a run: any object with this method."""

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Record the numbers as those of step `step`."""
        ...


class TensorBoard:
    """Logger that writes event files into `folder`; `options` are SummaryWriter's."""

    def __init__(self, folder: str | os.PathLike[str], **options: Any) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("TensorBoard", "tensorboard") from error
        self._writer: Any = SummaryWriter(os.fspath(folder), **options)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Logger to a new Weights & Biases run; `options` are those of wandb.init."""

    def __init__(self, **options: Any) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("WandB", "wandb") from error
        self._run: Any = wandb.init(**options)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


def prometheus(stats: Stats, **labels: object) -> str:
    """Return the numbers in Prometheus' text format 0.0.4, each with `labels`, e.g. rank=0.

    The text suits a file that node_exporter collects, or the answer to a scrape.
    """
    for name in labels:
        if not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", name) or name.startswith("__"):
            raise ConfigError(f"label {name!r} must be a-z, A-Z, 0-9 and _, and not begin with __")
        if name in _LABELS.values():
            raise ConfigError(f"label {name!r} is gradwire's own: choose another name")
    lines, last_field = [], ""
    for field, key, value in _samples(stats):
        kind, text = METRICS[field]
        name = f"gradwire_{field}_total" if kind == "counter" else f"gradwire_{field}"
        if field != last_field:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            last_field = field
        field_label = {_LABELS[field]: key} if key else {}
        lines.append(f"{name}{_labels({**labels, **field_label})} {_number(value)}")
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, object]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escape(str(v))}"' for name, v in labels.items()) + "}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(value)


def _missing(feature: str, package: str) -> ConfigError:
    return ConfigError(f"{feature} needs the package {package!r}: pip install {package}")
