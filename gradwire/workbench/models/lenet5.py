"""LeNet-5 on 28 x 28 images: 61,706 parameters."""

from torch import nn

from gradwire.workbench.models.initialise import xavier_
from gradwire.workbench.models.spec import Embedded, ModelSpec


def lenet5(classes: int = 10) -> nn.Module:
    """Return LeNet-5: two convolutions, three linear layers.

    The first layer's padding makes 28 x 28 pixels the 32 x 32 of the original.
    """
    return xavier_(
        nn.Sequential(
            nn.Conv2d(1, 6, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 5 * 5, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, classes),
        )
    )


SPEC = ModelSpec(
    name="lenet5",
    summary="LeCun's network of 1998 with ReLU and max pooling",
    make=lenet5,
    parameters=61_706,
    shape=(1, 28, 28),
    batch=128,
    lr=0.01,
    epochs=20,
    data=("mnist",),
    embedded=Embedded("digits", batch=32, lr=0.01, epochs=20),
)
