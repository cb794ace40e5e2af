"""What `train` needs to know about a network besides its code."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class ModelSpec:
    """One network and the published recipe it is trained with.

    `batch` is per worker. `clip` is the largest norm of an averaged gradient, 0 for any. `task`
    says what is learned: "classify", "language", "speech", or "" for a network that is here for
    its size alone. `data` are the data sets it is trained on, the usual one first.
    """

    name: str
    summary: str
    make: Callable[..., nn.Module]
    parameters: int
    shape: tuple[int, ...]
    batch: int
    lr: float
    epochs: int
    momentum: float = 0.9
    clip: float = 0.0
    task: str = "classify"
    data: tuple[str, ...] = ()
    optimizer: str = "sgd"
    embedded: "Embedded | None" = None

    def build(self, **kw: object) -> nn.Module:
        """The network with fresh weights, drawn from torch's global generator."""
        return self.make(**kw)


@dataclass(frozen=True)
class Embedded:
    """The recipe on the data that needs no files, where the published values would make a few
    hundred short steps do the work of tens of thousands. `size` makes the network small."""

    data: str
    batch: int
    lr: float
    epochs: int
    momentum: float = 0.9
    size: Mapping[str, Any] = field(default_factory=dict)
