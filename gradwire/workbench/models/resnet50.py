"""ResNet-50 for ImageNet: 25,557,032 parameters.

He et al. (2016), with the stride on the 3 x 3 convolution as in later implementations.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.workbench.models.initialise import kaiming_
from gradwire.workbench.models.spec import ModelSpec

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Width, number of blocks and stride of each stage."""
EXPANSION = 4
"""Channels that leave a block, as a multiple of its width."""


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution without bias and its batch norm."""
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """1 x 1 down, 3 x 3, 1 x 1 up, and a shortcut; it is projected where the shape changes."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.down = _conv(inputs, width, 1)
        self.across = _conv(width, width, 3, stride)
        self.up = _conv(width, outputs, 1)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else _conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.up(F.relu(self.across(F.relu(self.down(x)))))
        return F.relu(out + self.shortcut(x))


class ResNet50(nn.Module):
    """A 7 x 7 convolution, 16 bottlenecks in four stages, and a linear classifier."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first = _conv(3, 64, 7, stride=2)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        blocks: list[nn.Module] = []
        inputs = 64
        for width, count, stride in STAGES:
            for i in range(count):
                blocks.append(Bottleneck(inputs, width, stride if i == 0 else 1))
                inputs = EXPANSION * width
        self.blocks = nn.Sequential(*blocks)
        self.linear = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.pool(F.relu(self.first(x))))
        return self.linear(x.mean(dim=(2, 3)))


def resnet50(classes: int = 1000) -> nn.Module:
    """Return the 50-layer residual network for 224 x 224 images."""
    return kaiming_(ResNet50(classes))


SPEC = ModelSpec(
    name="resnet50",
    summary="residual network of 50 layers for ImageNet",
    make=resnet50,
    parameters=25_557_032,
    shape=(3, 224, 224),
    batch=128,
    lr=0.01,
    epochs=70,
    task="",
)
