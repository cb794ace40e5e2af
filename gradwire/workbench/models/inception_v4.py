"""Inception-v4 for ImageNet: 42,679,816 parameters.

Szegedy et al. (2017), Figures 3 to 9. A block is a list of branches, a branch a chain of
convolutions (outputs, height, width); "pool" stands for a pooling.
"""

import torch
from torch import Tensor, nn

from gradwire.workbench.models.initialise import kaiming_
from gradwire.workbench.models.spec import ModelSpec


class Conv(nn.Sequential):
    """A convolution without bias, batch norm, ReLU. Only strided ones and the stem are unpadded."""

    def __init__(
        self, inputs: int, outputs: int, height: int, width: int, stride: int = 1, pad: bool = True
    ) -> None:
        padding = (height // 2, width // 2) if pad and stride == 1 else 0
        convolution = nn.Conv2d(inputs, outputs, (height, width), stride, padding, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(outputs, eps=1e-3), nn.ReLU())


Step = tuple[int, int, int]


def chain(inputs: int, *steps: Step, stride: int = 1, pad: bool = True) -> nn.Sequential:
    """Convolutions one after the other, the last with `stride`."""
    layers = []
    for i, (outputs, height, width) in enumerate(steps):
        last = stride if i == len(steps) - 1 else 1
        layers.append(Conv(inputs, outputs, height, width, last, pad))
        inputs = outputs
    return nn.Sequential(*layers)


class Branches(nn.Module):
    """The outputs of several branches on the same input, side by side."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def pooled(inputs: int, outputs: int) -> nn.Sequential:
    """The mean of each pixel's surroundings, then a 1 x 1 convolution."""
    mean = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
    return nn.Sequential(mean, Conv(inputs, outputs, 1, 1))


def stem() -> nn.Sequential:
    """299 x 299 x 3 to 35 x 35 x 384."""
    top = Conv(3, 32, 3, 3, stride=2), Conv(32, 32, 3, 3, pad=False), Conv(32, 64, 3, 3)
    first = Branches(nn.MaxPool2d(3, 2), Conv(64, 96, 3, 3, stride=2))
    second = Branches(
        nn.Sequential(Conv(160, 64, 1, 1), Conv(64, 96, 3, 3, pad=False)),
        nn.Sequential(
            *chain(160, (64, 1, 1), (64, 1, 7), (64, 7, 1)), Conv(64, 96, 3, 3, pad=False)
        ),
    )
    third = Branches(Conv(192, 192, 3, 3, stride=2), nn.MaxPool2d(3, 2))
    return nn.Sequential(*top, first, second, third)


def block_a() -> Branches:
    """35 x 35 x 384 to the same."""
    return Branches(
        chain(384, (96, 1, 1)),
        chain(384, (64, 1, 1), (96, 3, 3)),
        chain(384, (64, 1, 1), (96, 3, 3), (96, 3, 3)),
        pooled(384, 96),
    )


def reduction_a() -> Branches:
    """35 x 35 x 384 to 17 x 17 x 1024."""
    return Branches(
        chain(384, (384, 3, 3), stride=2),
        chain(384, (192, 1, 1), (224, 3, 3), (256, 3, 3), stride=2),
        nn.MaxPool2d(3, 2),
    )


def block_b() -> Branches:
    """17 x 17 x 1024 to the same."""
    return Branches(
        chain(1024, (384, 1, 1)),
        chain(1024, (192, 1, 1), (224, 1, 7), (256, 7, 1)),
        chain(1024, (192, 1, 1), (192, 7, 1), (224, 1, 7), (224, 7, 1), (256, 1, 7)),
        pooled(1024, 128),
    )


def reduction_b() -> Branches:
    """17 x 17 x 1024 to 8 x 8 x 1536."""
    return Branches(
        chain(1024, (192, 1, 1), (192, 3, 3), stride=2),
        chain(1024, (256, 1, 1), (256, 1, 7), (320, 7, 1), (320, 3, 3), stride=2),
        nn.MaxPool2d(3, 2),
    )


def block_c() -> Branches:
    """8 x 8 x 1536 to the same."""

    def split(inputs: int) -> Branches:
        return Branches(Conv(inputs, 256, 1, 3), Conv(inputs, 256, 3, 1))

    return Branches(
        chain(1536, (256, 1, 1)),
        nn.Sequential(chain(1536, (384, 1, 1)), split(384)),
        nn.Sequential(chain(1536, (384, 1, 1), (448, 3, 1), (512, 1, 3)), split(512)),
        pooled(1536, 256),
    )


class InceptionV4(nn.Module):
    """The stem, 4 blocks A, 7 blocks B, 3 blocks C, and a linear classifier."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            stem(),
            *(block_a() for _ in range(4)),
            reduction_a(),
            *(block_b() for _ in range(7)),
            reduction_b(),
            *(block_c() for _ in range(3)),
        )
        self.drop = nn.Dropout(0.2)
        self.linear = nn.Linear(1536, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.drop(self.features(x).mean(dim=(2, 3))))


def inception_v4(classes: int = 1000) -> nn.Module:
    """Inception-v4 for 299 x 299 images; the mean at the end takes others too."""
    return kaiming_(InceptionV4(classes))


SPEC = ModelSpec(
    name="inception-v4",
    summary="Inception-v4 for ImageNet",
    make=inception_v4,
    parameters=42_679_816,
    shape=(3, 299, 299),
    batch=128,
    lr=0.01,
    epochs=70,
    task="",
)
