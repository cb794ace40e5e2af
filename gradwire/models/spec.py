"""What `train` needs to know about a network besides its code."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class ModelSpec:
    """One network and the published recipe it is trained with.

    `batch` is per worker. `digits_batch`, `digits_lr` and `digits_epochs` are the defaults on the
    5,000 embedded digits, where the published values would make a few hundred short steps do the
    work of tens of thousands.
    """

    name: str
    summary: str
    make: Callable[..., nn.Module]
    parameters: int
    shape: tuple[int, int, int]
    data: str
    batch: int
    lr: float
    epochs: int
    digits_batch: int
    digits_lr: float
    digits_epochs: int

    def build(self, **kw: object) -> nn.Module:
        """The network with fresh weights, drawn from torch's global generator."""
        return self.make(**kw)
