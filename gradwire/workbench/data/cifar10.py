"""CIFAR-10 from `cifar-10-batches-py/`, the official archive's folder."""

from pathlib import Path

import torch
from torch import Tensor

from gradwire.workbench.data.dataset import DataError, Dataset
from gradwire.workbench.data.pickled import Array, read_pickle

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

FOLDER = "cifar-10-batches-py"
TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST = "test_batch"


def load_cifar10(folder: Path) -> Dataset:
    """Return 50,000 + 10,000 colour images of 32 x 32 pixels, cropped and flipped in training."""
    parts = [_read_batch(_find_file(folder, name)) for name in TRAIN]
    test, test_labels = _read_batch(_find_file(folder, TEST))
    train = torch.cat([images for images, _ in parts])
    train_labels = torch.cat([labels for _, labels in parts])
    return Dataset("cifar10", train, train_labels, test, test_labels, MEAN, STD, augment=True)


def _find_file(folder: Path, name: str) -> Path:
    """Return the path of the file `name`, or raise an error that lists the places."""
    for place in (folder / FOLDER, folder):
        if (place / name).is_file():
            return place / name
    archive = next(folder.glob("cifar-10-python.tar*"), None) if folder.is_dir() else None
    hint = f" {archive} is there: unpack it first." if archive else ""
    raise DataError(
        f"no {name} in {folder / FOLDER} or {folder}.{hint} CIFAR-10 is the files "
        f"{TRAIN[0]} ... {TRAIN[-1]} and {TEST}; they come from Alex Krizhevsky's page, as the "
        "python version (www.cs.toronto.edu/~kriz/cifar.html)."
    )


def _read_batch(path: Path) -> tuple[Tensor, Tensor]:
    """Return the images and labels of one file."""
    try:
        batch = read_pickle(path.read_bytes())
        data, labels = batch["data"], batch["labels"]
        if not isinstance(data, Array) or not isinstance(labels, list):
            raise TypeError("its data or labels are of another type")
        if not all(type(label) is int for label in labels):
            raise TypeError("its labels are not numbers")
        images = data.tensor().reshape(-1, 3, 32, 32)
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images and {len(labels)} labels")
        return images, _check_labels(torch.tensor(labels, dtype=torch.int64), path)
    except DataError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise DataError(
            f"{path} is not a CIFAR-10 batch: {type(error).__name__}: {error}. Fetch it again."
        ) from error


def _check_labels(labels: Tensor, path: Path) -> Tensor:
    """Return the labels, or raise if one is not in 0 to 9."""
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) <= 9:
        raise DataError(f"{path} holds labels outside 0 to 9. Fetch it again.")
    return labels
