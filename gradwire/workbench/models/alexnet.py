"""AlexNet for ImageNet: 61,100,840 parameters."""

from torch import Tensor, nn

from gradwire.workbench.models.initialise import kaiming_
from gradwire.workbench.models.spec import ModelSpec


class AlexNet(nn.Module):
    """Five convolutions and three linear layers: the one-tower form of Krizhevsky (2014)."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, kernel_size=11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(64, 192, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(192, 384, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(384, 256, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 256, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
        )
        self.pool = nn.AdaptiveAvgPool2d(6)
        self.classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(256 * 36, 4096),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Linear(4096, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(x)).flatten(1))


def alexnet(classes: int = 1000) -> nn.Module:
    """Return AlexNet for 224 x 224 images."""
    return kaiming_(AlexNet(classes))


SPEC = ModelSpec(
    name="alexnet",
    summary="Krizhevsky's network for ImageNet, one tower",
    make=alexnet,
    parameters=61_100_840,
    shape=(3, 224, 224),
    batch=128,
    lr=0.01,
    epochs=70,
    task="",
)
