"""VGG-16: with batch norm for CIFAR-10 (14,728,266 parameters), without for ImageNet (138,357,544).

Simonyan and Zisserman (2015), configuration D. Of a 32 x 32 image five poolings leave one pixel, so
the classifier is a single 512-10 layer.
"""

from torch import Tensor, nn

from gradwire.workbench.models.initialise import kaiming_
from gradwire.workbench.models.spec import Embedded, ModelSpec

STAGES = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))
"""Width, as a multiple of the first, and number of convolutions before each pooling."""


def _convolutions(width: int, norm: bool) -> tuple[nn.Sequential, int]:
    """Return the 13 convolutions, and the number of channels that leave the last."""
    layers: list[nn.Module] = []
    inputs = 3
    for factor, count in STAGES:
        for _ in range(count):
            outputs = factor * width
            layers.append(nn.Conv2d(inputs, outputs, kernel_size=3, padding=1))
            layers += [nn.BatchNorm2d(outputs)] if norm else []
            layers.append(nn.ReLU())
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers), inputs


def vgg16_cifar(classes: int = 10, width: int = 64) -> nn.Module:
    """Return VGG-16 with batch norm for 32 x 32 images; `width`: of the first convolution."""
    features, outputs = _convolutions(width, norm=True)
    return kaiming_(nn.Sequential(features, nn.Flatten(), nn.Linear(outputs, classes)))


class VGG16(nn.Module):
    """VGG-16 for 224 x 224 images."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features, outputs = _convolutions(64, norm=False)
        self.pool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(outputs * 49, 4096),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(4096, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(x)).flatten(1))


def vgg16(classes: int = 1000) -> nn.Module:
    """Return VGG-16 for ImageNet."""
    return kaiming_(VGG16(classes))


CIFAR = ModelSpec(
    name="vgg16-cifar",
    summary="VGG-16 with batch norm for CIFAR-10",
    make=vgg16_cifar,
    parameters=14_728_266,
    shape=(3, 32, 32),
    batch=128,
    lr=0.1,
    epochs=140,
    data=("cifar10",),
    embedded=Embedded("digits", batch=32, lr=0.02, epochs=5, size={"width": 16}),
)

IMAGENET = ModelSpec(
    name="vgg16",
    summary="VGG-16 for ImageNet",
    make=vgg16,
    parameters=138_357_544,
    shape=(3, 224, 224),
    batch=128,
    lr=0.01,
    epochs=70,
    task="",
)
