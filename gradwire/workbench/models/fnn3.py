"""FNN-3: 784-200-200-10, 199,210 parameters."""

from torch import nn

from gradwire.workbench.models.initialise import xavier_
from gradwire.workbench.models.spec import Embedded, ModelSpec


def fnn3(classes: int = 10, hidden: int = 200) -> nn.Module:
    """Return a fully connected network with two hidden layers for 28 x 28 images."""
    return xavier_(
        nn.Sequential(
            nn.Flatten(),
            nn.Linear(28 * 28, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )
    )


SPEC = ModelSpec(
    name="fnn3",
    summary="784-200-200-10 fully connected",
    make=fnn3,
    parameters=199_210,
    shape=(1, 28, 28),
    batch=128,
    lr=0.01,
    epochs=20,
    data=("mnist",),
    embedded=Embedded("digits", batch=32, lr=0.01, epochs=20),
)
