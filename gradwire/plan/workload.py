"""What is trained: parameters in the order their gradients come, and when each one comes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.accumulate.layout import arrange
from gradwire.errors import ConfigError
from gradwire.types import MAX_SIZE, Slot, align

BACKWARD = 2 / 3
"""The backward pass takes two of three multiplications."""
Shapes = tuple[tuple[int, ...], ...]
PIECES = 256
"""A number of parameters is cut into so many, of one size."""


@dataclass(frozen=True)
class Workload:
    """A network on one worker, without any exchange.

    shapes: of each parameter, the last layer's first, as gradients come. weights: the share of the
    backward pass that ends with this gradient. seconds: one step of one worker alone.
    """

    name: str
    shapes: Shapes
    weights: tuple[float, ...]
    seconds: float
    measured: bool
    """Whether the seconds were given, not computed from FLOP."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Entries of each parameter."""
        return tuple(map(math.prod, self.shapes))

    @property
    def entries(self) -> int:
        return sum(self.sizes)

    def bundles(self, bundle_mb: float) -> "list[Part]":
        """As `attach` makes them, in the order in which they are exchanged."""
        return _bundles(self.shapes, self.weights, min(bundle_mb * 1e6, 4.0 * MAX_SIZE))


class Part(NamedTuple):
    """A bundle: its entries, with padding too, its share of the backward pass, its parameters."""

    entries: int
    size: int
    share: float
    shapes: Shapes


@lru_cache(maxsize=64)
def _bundles(shapes: Shapes, weights: tuple[float, ...], limit: float) -> list[Part]:
    slots = [
        Slot(str(i), shape, (1,), torch.float32, 0, math.prod(shape))
        for i, shape in enumerate(shapes)
    ]
    return [
        Part(
            sum(s.numel for s in b),
            sum(align(s.numel) for s in b),
            sum(weights[int(s.name)] for s in b),
            tuple(s.shape for s in b),
        )
        for b in arrange(slots, limit, ())
    ]


def by_shapes(shapes: Sequence[Sequence[int]], name: str, seconds: float | None) -> Workload:
    """Parameters of these shapes, first layer first; gradients come at an even pace."""
    own = tuple(tuple(map(int, shape)) for shape in shapes)[::-1]
    sizes = [math.prod(shape) for shape in own]
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"{name}: no parameters, or one without entries")
    if seconds is None:
        raise ConfigError(f"{name}: the time of a step is not known from shapes: give step_seconds")
    return Workload(name, own, shares(sizes), check_seconds(seconds), True)


def by_file(path: Path, seconds: float | None) -> Workload:
    """A `.pt` of shapes: a list of them, or names to shapes or to tensors, as a state_dict."""
    try:
        saved = torch.load(path, map_location="meta", weights_only=True)
    except FileNotFoundError:
        raise ConfigError(f"{path} is not there; model is a name or a .pt of shapes") from None
    except Exception as error:
        text = str(error).splitlines()[0]
        raise ConfigError(f"{path} is no .pt of shapes: {text}") from error
    return by_shapes(list(_shapes(saved, path)), path.stem, seconds)


def by_count(params: int, seconds: float | None) -> Workload:
    """So many parameters, in pieces of one size."""
    if not isinstance(params, int) or isinstance(params, bool) or params < 1:
        raise ConfigError(f"params must be a whole number of at least 1, got {params!r}")
    pieces = min(params, max(PIECES, -(-params // (MAX_SIZE // 2))))
    shapes = [[params // pieces + (i < params % pieces)] for i in range(pieces)]
    return by_shapes(shapes, f"{params:,} parameters", seconds)


def _shapes(saved: Any, path: Path) -> Iterator[Sequence[int]]:
    found = saved.values() if isinstance(saved, Mapping) else saved
    if not isinstance(saved, Mapping | list | tuple):
        raise ConfigError(f"{path} holds {type(saved).__name__}, not a list or a dict of shapes")
    for shape in found:
        if isinstance(shape, Tensor):
            yield tuple(shape.shape)
        elif isinstance(shape, list | tuple) and all(isinstance(n, int) for n in shape):
            yield shape
        else:
            raise ConfigError(f"{path} holds {shape!r}, which is neither a shape nor a tensor")


def shares(weights: Sequence[float]) -> tuple[float, ...]:
    """Of each weight in their sum."""
    total = sum(weights)
    return tuple(w / total for w in weights)


def check_seconds(seconds: float) -> float:
    """Raise ConfigError unless a step can take so long."""
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"step_seconds must be 0 or more, got {seconds!r}")
    return float(seconds)
