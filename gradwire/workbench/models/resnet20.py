"""ResNet-20 for 32 x 32 images: 269,722 parameters.

The shortcuts have no parameters (option A of the paper). Where the shape changes, a shortcut takes
every second pixel and sets the new channels to zero. With projections there would be 272,474
parameters.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.workbench.models.initialise import kaiming_
from gradwire.workbench.models.spec import Embedded, ModelSpec


def _conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    """Return a padded 3 x 3 convolution without bias; with stride 1 it keeps the image's size."""
    return nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(inputs, outputs, stride)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = _conv3x3(outputs, outputs)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.extra = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))

    def shortcut(self, x: Tensor) -> Tensor:
        """Return `x` in the shape of the block's output."""
        if self.stride == 1 and self.extra == 0:
            return x
        half = self.extra // 2
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, half))


class ResNet(nn.Module):
    """A first convolution, three stages of `blocks` blocks each, and a linear classifier."""

    def __init__(self, blocks: int, classes: int) -> None:
        super().__init__()
        self.conv = _conv3x3(3, 16)
        self.norm = nn.BatchNorm2d(16)
        stages = [(16, 16, 1), (16, 32, 2), (32, 64, 2)]
        self.stages = nn.Sequential(
            *(
                ResidualBlock(inputs if i == 0 else outputs, outputs, stride if i == 0 else 1)
                for inputs, outputs, stride in stages
                for i in range(blocks)
            )
        )
        self.linear = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(F.relu(self.norm(self.conv(x))))
        return self.linear(x.mean(dim=(2, 3)))


def resnet20(classes: int = 10) -> nn.Module:
    """Return the 20-layer residual network for CIFAR-10."""
    return kaiming_(ResNet(blocks=3, classes=classes))


SPEC = ModelSpec(
    name="resnet20",
    summary="residual network of 20 layers for CIFAR-10",
    make=resnet20,
    parameters=269_722,
    shape=(3, 32, 32),
    batch=32,
    lr=0.1,
    epochs=140,
    data=("cifar10",),
    embedded=Embedded("digits", batch=32, lr=0.1, epochs=5),
)
