"""Workload: the parameters in the order of their gradients, and the time of each gradient."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradwire.accumulate.layout import arrange
from gradwire.errors import ConfigError
from gradwire.plan.show import show_count
from gradwire.types import MAX_SIZE, Slot, align

BACKWARD = 2 / 3
"""The share of a step that the backward pass takes: two of three multiplications."""
Shapes = tuple[tuple[int, ...], ...]
"""The shapes of all parameters."""
_LARGE = 500_000_000
"""Entries from which on a network without convolutions is taken for a transformer."""
_PIECES = 256
"""The number of pieces of equal size that stand for a number of parameters."""


@dataclass(frozen=True)
class Workload:
    """Network on one worker, without any exchange.

    shapes: the shape of each parameter, the last layer's first, in the order of the gradients.
    weights: the share of the backward pass that ends with each gradient.
    seconds: one step of one worker alone.
    """

    name: str
    shapes: Shapes
    weights: tuple[float, ...]
    seconds: float
    measured: bool
    """True: the seconds were given, not computed from FLOP."""
    optimizer: str = ""
    """The optimiser that such a network is usually trained with; "" if that is not known."""
    is_assumed: bool = True
    """True: nobody has named the optimiser."""
    is_typical: bool = False
    """True: the optimiser follows from the network."""
    work: str = ""
    """What a step works on, in words, if the seconds are computed."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Entries of each parameter."""
        return tuple(map(math.prod, self.shapes))

    @property
    def entries(self) -> int:
        """Entries of all parameters."""
        return sum(self.sizes)

    @property
    def knows_shapes(self) -> bool:
        """True: there are shapes of parameters, and not only their number."""
        return any(len(shape) > 1 for shape in self.shapes)

    @property
    def is_transformer(self) -> bool:
        """True: most entries are in matrices, and Adam trains them; also if only large."""
        flat = sum(math.prod(s) for s in self.shapes if len(s) <= 2)
        return self.optimizer != "sgd" and 2 * flat > self.entries

    @property
    def optimizer_name(self) -> str:
        """The optimiser as people write it."""
        return {"adamw": "AdamW", "muon": "Muon"}.get(self.optimizer, "SGD")

    @property
    def has_batch_norm(self) -> bool:
        """True: convolutions, and about two vectors for each, the scale and the shift of a norm."""
        kernels = sum(len(shape) > 2 for shape in self.shapes)
        vectors = sum(len(shape) == 1 for shape in self.shapes)
        return kernels > 0 and vectors >= 1.5 * kernels

    def guessed(self, seconds: float, work: str) -> "Workload":
        """Return the same with computed seconds of a step on `work`."""
        return replace(self, seconds=seconds, measured=False, work=work)

    def bundles(self, bundle_mb: float) -> "list[PlannedBundle]":
        """Return the bundles as `attach` makes them, in the order of their exchanges."""
        return _planned_bundles(self.shapes, self.weights, min(bundle_mb * 1e6, 4.0 * MAX_SIZE))


class PlannedBundle(NamedTuple):
    """Bundle: its entries, its size with padding, its share of the backward pass, its shapes."""

    entries: int
    size: int
    share: float
    shapes: Shapes


@lru_cache(maxsize=64)
def _planned_bundles(
    shapes: Shapes, weights: tuple[float, ...], limit: float
) -> list[PlannedBundle]:
    slots = [
        Slot(str(i), shape, (1,), torch.float32, 0, math.prod(shape))
        for i, shape in enumerate(shapes)
    ]
    return [
        PlannedBundle(
            sum(s.numel for s in b),
            sum(align(s.numel) for s in b),
            sum(weights[int(s.name)] for s in b),
            tuple(s.shape for s in b),
        )
        for b in arrange(slots, limit, ())
    ]


def by_shapes(
    shapes: Sequence[Sequence[int]], name: str, seconds: float | None, optimizer: str = ""
) -> Workload:
    """Return a workload of these shapes, first layer first; gradients come at an even pace.

    optimizer: the usual one, if that is known better than from the shapes.
    """
    reversed_shapes = tuple(tuple(map(int, shape)) for shape in shapes)[::-1]
    sizes = [math.prod(shape) for shape in reversed_shapes]
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"{name}: no parameters, or one without entries")
    if seconds is None:
        raise ConfigError(f"{name}: the time of a step is not known from shapes: give step_seconds")
    return Workload(
        name, reversed_shapes, shares_of(sizes), check_seconds(seconds), True,
        optimizer or _usual_optimizer(reversed_shapes),
    )  # fmt: skip


def by_module(module: nn.Module, seconds: float | None) -> Workload:
    """Return the workload of a module: its parameters that are trained."""
    kinds = [type(m) for m in module.modules()]
    attends = any("attention" in kind.__name__.lower() for kind in kinds)
    embeds = nn.Embedding in kinds and not {nn.Conv2d, nn.LSTM, nn.GRU} & set(kinds)
    trained = [tuple(p.shape) for p in module.parameters() if p.requires_grad]
    usual = "adamw" if attends or embeds else ""
    return by_shapes(trained, type(module).__name__, seconds, usual)


def _usual_optimizer(shapes: Shapes) -> str:
    """Return sgd for networks of convolutions, adamw for very large ones, and "" for the rest."""
    if any(len(shape) > 2 for shape in shapes):
        return "sgd"
    return "adamw" if sum(map(math.prod, shapes)) >= _LARGE else ""


def by_file(path: Path, seconds: float | None) -> Workload:
    """Return the workload of a `.pt` of shapes: a list, or names to shapes or to tensors.

    A state_dict is such a file.
    """
    try:
        saved = torch.load(path, map_location="meta", weights_only=True)
    except FileNotFoundError:
        raise ConfigError(f"{path} is not there; model is a name or a .pt of shapes") from None
    except Exception as error:
        text = str(error).splitlines()[0]
        raise ConfigError(f"{path} is no .pt of shapes: {text}") from error
    return by_shapes(list(_read_shapes(saved, path)), path.stem, seconds)


def by_count(params: int, seconds: float | None) -> Workload:
    """Return a workload of this number of parameters, in pieces of one size."""
    if not isinstance(params, int) or isinstance(params, bool) or params < 1:
        raise ConfigError(f"params must be a whole number of at least 1, got {params!r}")
    pieces = min(params, max(_PIECES, -(-params // (MAX_SIZE // 2))))
    shapes = [[params // pieces + (i < params % pieces)] for i in range(pieces)]
    return by_shapes(shapes, f"{show_count(params)} parameters", seconds)


def _read_shapes(saved: Any, path: Path) -> Iterator[Sequence[int]]:
    shapes = saved.values() if isinstance(saved, Mapping) else saved
    if not isinstance(saved, Mapping | list | tuple):
        raise ConfigError(f"{path} holds {type(saved).__name__}, not a list or a dict of shapes")
    for shape in shapes:
        if isinstance(shape, Tensor):
            yield tuple(shape.shape)
        elif isinstance(shape, list | tuple) and all(isinstance(n, int) for n in shape):
            yield shape
        else:
            raise ConfigError(f"{path} holds {shape!r}, which is neither a shape nor a tensor")


def shares_of(weights: Sequence[float]) -> tuple[float, ...]:
    """Return the share of each weight in their sum."""
    total = sum(weights)
    return tuple(w / total for w in weights)


def check_seconds(seconds: float) -> float:
    """Raise ConfigError for seconds that no step can take."""
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"step_seconds must be 0 or more, got {seconds!r}")
    return float(seconds)
