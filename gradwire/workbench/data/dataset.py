"""Images and labels in memory, and what is done to them on the way into a network."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import GradwireError
from gradwire.workbench.data.augment import cut, draw


class DataError(GradwireError, ValueError):
    """A data set that is missing, damaged, or does not fit the model."""


@dataclass(frozen=True)
class Dataset:
    """A training and a test set: images uint8 [n, channels, height, width], labels int64 [n].

    `mean` and `std` are per channel, in units of [0, 1]. `augment` says whether training images
    are cropped and flipped at random.
    """

    name: str
    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: bool = False
    at_once: int = 500

    def __post_init__(self) -> None:
        for part, images, labels in (
            ("training", self.train, self.train_labels),
            ("test", self.test, self.test_labels),
        ):
            if len(images) != len(labels):
                raise DataError(
                    f"{self.name}: {len(images)} {part} images but {len(labels)} labels. "
                    "The files do not belong together; fetch them again."
                )

    @property
    def examples(self) -> int:
        return len(self.train)

    @property
    def test_examples(self) -> int:
        return len(self.test)

    @property
    def network(self) -> Mapping[str, Any]:
        """What a network has to be built with."""
        return {}

    def to(self, device: torch.device) -> "Dataset":
        """The same data on `device`, so that batches are cut there."""
        return Dataset(
            self.name,
            self.train.to(device),
            self.train_labels.to(device),
            self.test.to(device),
            self.test_labels.to(device),
            self.mean,
            self.std,
            self.augment,
        )

    def training_batch(self, indices: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Normalised images and labels; `seed` decides the crops and flips."""
        draws = self.draw(seed, len(indices))
        device = self.train.device
        return self.cut(indices.to(device), None if draws is None else draws.to(device))

    def draw(self, seed: int, n: int) -> Tensor | None:
        """What is drawn for a batch of `n`; None without augmentation."""
        return draw(seed, n) if self.augment else None

    def cut(self, indices: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
        """`training_batch` of what was drawn; nothing waits for the device."""
        images = self.train[indices]
        if draws is not None:
            images = cut(images, draws)
        return self.normalise(images), self.train_labels[indices]

    def test_batch(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Normalised test images [start, stop) and their labels."""
        return self.normalise(self.test[start:stop]), self.test_labels[start:stop]

    def normalise(self, images: Tensor) -> Tensor:
        """fp32 images of zero mean and unit deviation over the training set."""
        mean, std = self._moments
        return (images.float() / 255 - mean) / std

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        """Kept on the device: a copy from the host waits for it."""
        mean, std = (
            torch.tensor(x, dtype=torch.float32, device=self.train.device)
            for x in (self.mean, self.std)
        )
        return mean.view(-1, 1, 1), std.view(-1, 1, 1)
