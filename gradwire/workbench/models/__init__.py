"""The networks of the papers, by name.

    model = gradwire.workbench.models.build("lenet5")

To add a network, write a file with its function and its `SPEC`, and add a line to `MODELS`.
"""

from torch import nn

from gradwire.errors import unknown
from gradwire.workbench.models import (
    alexnet,
    decoder,
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
        *decoder.SPECS,
        alexnet.SPEC,
        vgg16.IMAGENET,
        resnet50.SPEC,
        inception_v4.SPEC,
    )
}
"""The networks of Table 1 of Shi et al. (2019), small GPTs, and the networks of Table 2.

There is no reader for the data of Table 2, so only the sizes of its networks are used.
"""

TRAINABLE = tuple(name for name, spec in MODELS.items() if spec.task)
"""The names of the networks that `gradwire train` takes."""


def model_spec(name: str) -> ModelSpec:
    """Return the code and the recipe of the network `name`."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    return MODELS[name]


def build(name: str, **kw: object) -> nn.Module:
    """Return a network with fresh weights; keywords go to its function, e.g. `classes=100`."""
    return model_spec(name).build(**kw)


__all__ = ["MODELS", "TRAINABLE", "Embedded", "ModelSpec", "build", "model_spec"]
