"""The papers' networks by name.

    model = gradwire.models.build("lenet5")

To add one: a file with a function and its `SPEC`, and a line in `MODELS`.
"""

from torch import nn

from gradwire.errors import unknown
from gradwire.models import fnn3, lenet5, resnet20
from gradwire.models.spec import ModelSpec

MODELS: dict[str, ModelSpec] = {
    "fnn3": fnn3.SPEC,
    "lenet5": lenet5.SPEC,
    "resnet20": resnet20.SPEC,
}


def spec(name: str) -> ModelSpec:
    """The network's code and recipe; `unknown` names the nearest one otherwise."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    return MODELS[name]


def build(name: str, **kw: object) -> nn.Module:
    """A network with fresh weights; keywords go to its function, e.g. `classes=100`."""
    return spec(name).build(**kw)


__all__ = ["MODELS", "ModelSpec", "build", "spec"]
