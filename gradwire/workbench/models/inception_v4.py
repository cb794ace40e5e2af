"""Inception-v4 for ImageNet: 42,679,816 parameters.

Szegedy et al. (2017), Figures 3 to 9. A block is a list of branches. A branch is a chain of
convolutions, written as (outputs, height, width).
"""

import torch
from torch import Tensor, nn

from gradwire.workbench.models.initialise import kaiming_
from gradwire.workbench.models.spec import ModelSpec


class _Conv(nn.Sequential):
    """A convolution without bias, batch norm, ReLU; padded unless strided or `pad=False`."""

    def __init__(
        self, inputs: int, outputs: int, height: int, width: int, stride: int = 1, pad: bool = True
    ) -> None:
        padding = (height // 2, width // 2) if pad and stride == 1 else 0
        convolution = nn.Conv2d(inputs, outputs, (height, width), stride, padding, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(outputs, eps=1e-3), nn.ReLU())


Convolution = tuple[int, int, int]
"""(outputs, height, width)"""


def _chain(
    inputs: int, *convolutions: Convolution, stride: int = 1, pad: bool = True
) -> nn.Sequential:
    """Return convolutions one after the other; the last has the `stride`."""
    layers = []
    for i, (outputs, height, width) in enumerate(convolutions):
        last = stride if i == len(convolutions) - 1 else 1
        layers.append(_Conv(inputs, outputs, height, width, last, pad))
        inputs = outputs
    return nn.Sequential(*layers)


class _Branches(nn.Module):
    """Several branches on the same input; their outputs are joined along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def _pooled(inputs: int, outputs: int) -> nn.Sequential:
    """Return a 3 x 3 mean pooling, then a 1 x 1 convolution."""
    mean = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
    return nn.Sequential(mean, _Conv(inputs, outputs, 1, 1))


def _stem() -> nn.Sequential:
    """Return the layers from 299 x 299 x 3 to 35 x 35 x 384."""
    first_convolutions = (
        _Conv(3, 32, 3, 3, stride=2),
        _Conv(32, 32, 3, 3, pad=False),
        _Conv(32, 64, 3, 3),
    )
    first = _Branches(nn.MaxPool2d(3, 2), _Conv(64, 96, 3, 3, stride=2))
    second = _Branches(
        nn.Sequential(_Conv(160, 64, 1, 1), _Conv(64, 96, 3, 3, pad=False)),
        nn.Sequential(
            *_chain(160, (64, 1, 1), (64, 1, 7), (64, 7, 1)), _Conv(64, 96, 3, 3, pad=False)
        ),
    )
    third = _Branches(_Conv(192, 192, 3, 3, stride=2), nn.MaxPool2d(3, 2))
    return nn.Sequential(*first_convolutions, first, second, third)


def _block_a() -> _Branches:
    """Return a block A: 35 x 35 x 384 to the same size."""
    return _Branches(
        _chain(384, (96, 1, 1)),
        _chain(384, (64, 1, 1), (96, 3, 3)),
        _chain(384, (64, 1, 1), (96, 3, 3), (96, 3, 3)),
        _pooled(384, 96),
    )


def _reduction_a() -> _Branches:
    """Return the reduction from 35 x 35 x 384 to 17 x 17 x 1024."""
    return _Branches(
        _chain(384, (384, 3, 3), stride=2),
        _chain(384, (192, 1, 1), (224, 3, 3), (256, 3, 3), stride=2),
        nn.MaxPool2d(3, 2),
    )


def _block_b() -> _Branches:
    """Return a block B: 17 x 17 x 1024 to the same size."""
    return _Branches(
        _chain(1024, (384, 1, 1)),
        _chain(1024, (192, 1, 1), (224, 1, 7), (256, 7, 1)),
        _chain(1024, (192, 1, 1), (192, 7, 1), (224, 1, 7), (224, 7, 1), (256, 1, 7)),
        _pooled(1024, 128),
    )


def _reduction_b() -> _Branches:
    """Return the reduction from 17 x 17 x 1024 to 8 x 8 x 1536."""
    return _Branches(
        _chain(1024, (192, 1, 1), (192, 3, 3), stride=2),
        _chain(1024, (256, 1, 1), (256, 1, 7), (320, 7, 1), (320, 3, 3), stride=2),
        nn.MaxPool2d(3, 2),
    )


def _block_c() -> _Branches:
    """Return a block C: 8 x 8 x 1536 to the same size."""

    def split(inputs: int) -> _Branches:
        return _Branches(_Conv(inputs, 256, 1, 3), _Conv(inputs, 256, 3, 1))

    return _Branches(
        _chain(1536, (256, 1, 1)),
        nn.Sequential(_chain(1536, (384, 1, 1)), split(384)),
        nn.Sequential(_chain(1536, (384, 1, 1), (448, 3, 1), (512, 1, 3)), split(512)),
        _pooled(1536, 256),
    )


class InceptionV4(nn.Module):
    """The stem, 4 blocks A, 7 blocks B, 3 blocks C, and a linear classifier."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _stem(),
            *(_block_a() for _ in range(4)),
            _reduction_a(),
            *(_block_b() for _ in range(7)),
            _reduction_b(),
            *(_block_c() for _ in range(3)),
        )
        self.drop = nn.Dropout(0.2)
        self.linear = nn.Linear(1536, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.drop(self.features(x).mean(dim=(2, 3))))


def inception_v4(classes: int = 1000) -> nn.Module:
    """Return Inception-v4 for 299 x 299 images; other sizes work too, because it ends in a mean."""
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
