"""Readers of the standard file layouts, and each rank's share of what they read."""

from pathlib import Path

from gradwire.data.cifar10 import load_cifar10
from gradwire.data.dataset import DataError, Dataset
from gradwire.data.digits import load_digits
from gradwire.data.mnist import load_mnist
from gradwire.data.shard import Shard, mix
from gradwire.errors import unknown

READERS = {"mnist": load_mnist, "cifar10": load_cifar10}


def load(name: str, folder: Path | str | None, shape: tuple[int, int, int]) -> Dataset:
    """The data set `name` from `folder`; "digits" needs none and takes the shape asked for."""
    if name == "digits":
        return load_digits(shape)
    if name not in READERS:
        raise unknown("data set", name, ["digits", *READERS])
    if folder is None:
        raise DataError(f"{name} is read from files: name their folder with --data-dir.")
    data = READERS[name](Path(folder).expanduser())
    if data.train.shape[1:] != shape:
        got = " x ".join(map(str, data.train.shape[1:]))
        want = " x ".join(map(str, shape))
        raise DataError(f"{name} has images of {got}, the model takes {want}.")
    return data


__all__ = ["DataError", "Dataset", "Shard", "load", "mix"]
