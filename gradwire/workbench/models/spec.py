"""The recipe of a network: everything that `train` needs besides the code."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class ModelSpec:
    """A network and its published recipe.

    parameters: the number of trained entries. shape: that of one input. batch: examples per worker.
    clip: the largest norm of an averaged gradient, 0 for no limit. cosine: True if the learning
    rate warms up and falls like a cosine. task: "classify", "language", "bytes", "speech", or ""
    for a network that is not trained here. data: the data sets to train on, the usual one first.
    embedded: the recipe on a data set without files.
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
    weight_decay: float = 0.0
    cosine: bool = False
    embedded: "Embedded | None" = None

    def build(self, **kw: object) -> nn.Module:
        """Return the network with fresh weights, drawn from torch's global generator."""
        return self.make(**kw)


@dataclass(frozen=True)
class Embedded:
    """The recipe of a network on a data set that needs no files.

    The published values are made for tens of thousands of steps; training here takes a few hundred.
    size: keywords that make the network small. muon_lr: Muon's learning rate, 0 if nobody looked
    for it.
    """

    data: str
    batch: int
    lr: float
    epochs: int
    momentum: float = 0.9
    size: Mapping[str, Any] = field(default_factory=dict)
    muon_lr: float = 0.0
