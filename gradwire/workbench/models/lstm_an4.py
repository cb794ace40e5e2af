"""LSTM-AN4: speech to letters with CTC, 27,569,568 parameters.

Deep Speech 2 (Amodei et al. 2016) in one direction only. Two convolutions over the spectrogram,
five LSTM layers of 800, and a look-ahead convolution that sees 20 frames of the future.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.workbench.models.initialise import xavier_
from gradwire.workbench.models.spec import Embedded, ModelSpec

BINS, CLASSES, CONTEXT = 161, 29, 20
CEILING = 20.0
"""The largest value after an activation, as in Deep Speech 2."""


class Norm(nn.BatchNorm1d):
    """Batch norm of [n, time, features] over n and time."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).view_as(x)


class Convolution(nn.Module):
    """A convolution of [n, channels, bins, frames] with batch norm; zero past an example's end."""

    def __init__(self, inputs: int, outputs: int, bins: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, (bins, 11), (2, stride), (bins // 2, 5))
        self.norm = nn.BatchNorm2d(outputs)
        self.stride = stride

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        lengths = torch.div(lengths - 1, self.stride, rounding_mode="floor") + 1
        x = F.hardtanh(self.norm(_mask(self.conv(x), lengths)), 0, CEILING)
        return _mask(x, lengths), lengths


def _mask(x: Tensor, lengths: Tensor) -> Tensor:
    """Return x [n, ..., frames] with zeros in the frames past each example's end."""
    frames = torch.arange(x.shape[-1], dtype=torch.int64, device=x.device)
    inside = frames < lengths[:, None]
    return x * inside.view(len(x), *[1] * (x.dim() - 2), -1)


class LookAhead(nn.Module):
    """A weighted sum of each frame and the next `context` frames; each feature has its weights."""

    def __init__(self, features: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.conv = nn.Conv1d(features, features, context + 1, groups=features, bias=False)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        ahead = F.pad(_mask(x.transpose(1, 2), lengths), (0, self.context))
        return F.hardtanh(self.conv(ahead).transpose(1, 2), 0, CEILING)


class SpeechModel(nn.Module):
    """A network that scores letters: ([n, 161, frames], lengths) to ([n, t, 29], lengths)."""

    def __init__(self, classes: int, hidden: int, layers: int, channels: int) -> None:
        super().__init__()
        self.conv1 = Convolution(1, channels, bins=41, stride=2)
        self.conv2 = Convolution(channels, channels, bins=21, stride=1)
        bins = -(-BINS // 4)
        sizes = [channels * bins] + [hidden] * (layers - 1)
        self.lstms = nn.ModuleList(nn.LSTM(size, hidden, batch_first=True) for size in sizes)
        self.norms = nn.ModuleList(Norm(hidden) for _ in range(layers - 1))
        self.ahead = LookAhead(hidden, CONTEXT)
        self.norm = Norm(hidden)
        self.linear = nn.Linear(hidden, classes, bias=False)

    def forward(self, sound: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x, lengths = self.conv1(_mask(sound[:, None], lengths), lengths)
        x, lengths = self.conv2(x, lengths)
        x = x.flatten(1, 2).transpose(1, 2)
        for norm, lstm in zip([nn.Identity(), *self.norms], self.lstms, strict=True):
            x, _ = lstm(norm(x))
        return self.linear(self.norm(self.ahead(x, lengths))), lengths


def lstm_an4(
    classes: int = CLASSES, hidden: int = 800, layers: int = 5, channels: int = 32
) -> nn.Module:
    """Return the speech model; its classes are blank, letters, space and apostrophe."""
    return xavier_(SpeechModel(classes, hidden, layers, channels))


SPEC = ModelSpec(
    name="lstm-an4",
    summary="five LSTM layers of 800 for speech, CTC",
    make=lstm_an4,
    parameters=27_569_568,
    shape=(BINS,),
    batch=4,
    lr=0.0002,
    epochs=100,
    clip=400.0,
    task="speech",
    data=("an4",),
    embedded=Embedded(
        "tones", batch=4, lr=0.003, epochs=8, size={"hidden": 64, "layers": 2, "channels": 8}
    ),
)
