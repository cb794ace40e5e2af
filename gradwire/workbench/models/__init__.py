"""The papers' networks by name.

    model = gradwire.workbench.models.build("lenet5")

To add one: a file with a function and its `SPEC`, and a line in `MODELS`.
"""

from torch import nn

from gradwire.errors import unknown
from gradwire.workbench.models import (
    alexnet,
    fnn3,
    gpt,
    inception_v4,
    lenet5,
    lstm_an4,
    lstm_ptb,
    resnet20,
    resnet50,
    vgg16,
)
from gradwire.workbench.models.spec import Embedded, ModelSpec

MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        fnn3.SPEC,
        lenet5.SPEC,
        resnet20.SPEC,
        vgg16.CIFAR,
        lstm_ptb.SPEC,
        lstm_an4.SPEC,
        gpt.SPEC,
        gpt.MICRO,
        alexnet.SPEC,
        vgg16.IMAGENET,
        resnet50.SPEC,
        inception_v4.SPEC,
    )
}
"""Table 1 of Shi et al. (2019), small GPTs, then Table 2, whose networks have no data set here."""

TRAINABLE = tuple(name for name, spec in MODELS.items() if spec.task)


def spec(name: str) -> ModelSpec:
    """The network's code and recipe; `unknown` names the nearest one otherwise."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    return MODELS[name]


def build(name: str, **kw: object) -> nn.Module:
    """A network with fresh weights; keywords go to its function, e.g. `classes=100`."""
    return spec(name).build(**kw)


__all__ = ["MODELS", "TRAINABLE", "Embedded", "ModelSpec", "build", "spec"]
