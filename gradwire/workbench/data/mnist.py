"""MNIST from its four idx files."""

from pathlib import Path

from torch import Tensor

from gradwire.workbench.data.dataset import DataError, Dataset
from gradwire.workbench.data.idx import read_idx

MEAN, STD = (0.1307,), (0.3081,)

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def load_mnist(folder: Path) -> Dataset:
    """Return 60,000 + 10,000 digits of 28 x 28 pixels.

    The files are plain or .gz, and lie in `folder`, in its MNIST/raw/ or in its raw/.
    """
    paths = [_find_file(folder, name) for name in FILES]
    train, test = (_check_images(read_idx(paths[i], 3), paths[i]) for i in (0, 2))
    train_labels, test_labels = (_check_labels(read_idx(paths[i], 1), paths[i]) for i in (1, 3))
    return Dataset("mnist", train, train_labels, test, test_labels, MEAN, STD)


def _find_file(folder: Path, name: str) -> Path:
    """Return the path of the file `name`, or raise an error that lists the places."""
    for place in (folder, folder / "MNIST" / "raw", folder / "raw"):
        for candidate in (place / name, place / f"{name}.gz"):
            if candidate.is_file():
                return candidate
    raise DataError(
        f"no {name} or {name}.gz in {folder} or {folder / 'MNIST' / 'raw'}. "
        f"MNIST is the four files {', '.join(FILES)}, each plain or .gz; they come from the "
        "MNIST page by LeCun, Cortes and Burges (yann.lecun.com/exdb/mnist)."
    )


def _check_images(images: Tensor, path: Path) -> Tensor:
    """Return the images with a channel, or raise if they are not 28 x 28."""
    if images.shape[1:] != (28, 28):
        size = " x ".join(map(str, images.shape[1:]))
        raise DataError(f"{path} holds images of {size} pixels; MNIST's are 28 x 28.")
    return images.unsqueeze(1)


def _check_labels(labels: Tensor, path: Path) -> Tensor:
    """Return the labels as int64, or raise if one is above 9."""
    if len(labels) and int(labels.max()) > 9:
        raise DataError(f"{path} holds the label {int(labels.max())}; MNIST's are 0 to 9.")
    return labels.long()
