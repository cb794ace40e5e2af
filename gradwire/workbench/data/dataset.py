"""Images and labels in memory, and their crops, flips and normalisation for a network."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import GradwireError
from gradwire.workbench.data.augment import cut_crops, draw_crops


class DataError(GradwireError, ValueError):
    """A data set that is missing, damaged, or does not fit the model."""


def read_utf8(path: Path) -> str:
    """Return the text of a file, or raise DataError if it is no UTF-8 or cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason}. Fetch it again.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).") from error


@dataclass(frozen=True)
class Dataset:
    """A training and a test set: images uint8 [n, channels, height, width], labels int64 [n].

    mean and std: per channel, in units of [0, 1]. augment: True if training images are cropped and
    flipped at random. at_once: the number of test images that fit into memory together.
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
        """Keywords that a network for this data set must be built with."""
        return {}

    def to(self, device: torch.device) -> "Dataset":
        """Return the same data on `device`, so that batches are cut there."""
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
        """Return normalised images and labels; `seed` decides the crops and flips."""
        draws = self.draw_crops(seed, len(indices))
        device = self.train.device
        return self.cut_batch(indices.to(device), None if draws is None else draws.to(device))

    def draw_crops(self, seed: int, n: int) -> Tensor | None:
        """Draw the crops and flips of a batch of `n`; None without augmentation."""
        return draw_crops(seed, n) if self.augment else None

    def cut_batch(self, indices: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the batch of `training_batch` from crops already drawn; no wait for the device."""
        images = self.train[indices]
        if draws is not None:
            images = cut_crops(images, draws)
        return self.normalise(images), self.train_labels[indices]

    def test_batch(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return normalised test images [start, stop) and their labels."""
        return self.normalise(self.test[start:stop]), self.test_labels[start:stop]

    def normalise(self, images: Tensor) -> Tensor:
        """Return fp32 images; the training set has zero mean and unit deviation."""
        mean, std = self._moments
        return (images.float() / 255 - mean) / std

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        """Mean and std per channel, kept on the device: a copy at each batch would wait for it."""
        mean, std = (
            torch.tensor(x, dtype=torch.float32, device=self.train.device)
            for x in (self.mean, self.std)
        )
        return mean.view(-1, 1, 1), std.view(-1, 1, 1)
