"""Data sets for training: readers of their usual files, embedded ones, and each rank's share."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gradwire.errors import unknown
from gradwire.workbench.data.an4 import load_an4
from gradwire.workbench.data.books import load_books, load_novels
from gradwire.workbench.data.cifar10 import load_cifar10
from gradwire.workbench.data.dataset import DataError, Dataset
from gradwire.workbench.data.digits import load_digits
from gradwire.workbench.data.letters import load_letters
from gradwire.workbench.data.mnist import load_mnist
from gradwire.workbench.data.phrases import load_phrases
from gradwire.workbench.data.shard import Shard
from gradwire.workbench.data.speech import LETTERS, Speech
from gradwire.workbench.data.text import Text, load_text
from gradwire.workbench.data.tones import load_tones

Shape = tuple[int, ...]


class Data(Protocol):
    """A data set, as training uses it; the parts of a batch depend on the model's task."""

    @property
    def name(self) -> str: ...
    @property
    def examples(self) -> int: ...
    @property
    def test_examples(self) -> int: ...
    @property
    def at_once(self) -> int:
        """The number of test examples that fit into memory together."""
        ...

    @property
    def network(self) -> Mapping[str, Any]:
        """Keywords that a network for this data set must be built with."""
        ...

    def to(self, device: torch.device) -> "Data": ...
    def training_batch(self, indices: Tensor, seed: int) -> tuple[Tensor, ...]: ...
    def test_batch(self, start: int, stop: int) -> tuple[Tensor, ...]: ...


EMBEDDED: dict[str, Callable[[Any], Data]] = {
    "digits": load_digits,
    "novels": lambda shape: load_novels(*shape),
    "phrases": lambda shape: load_phrases(*shape),
    "tones": lambda shape: load_tones(),
}
"""Data sets that need no files. A model's shape of one example goes to each."""

READERS: dict[str, Callable[[Path, Any], Data]] = {
    "mnist": lambda folder, shape: _with_shape(load_mnist(folder), shape),
    "cifar10": lambda folder, shape: _with_shape(load_cifar10(folder), shape),
    "ptb": lambda folder, shape: load_text("ptb", folder, *shape),
    "wikitext2": lambda folder, shape: load_text("wikitext2", folder, *shape),
    "shakespeare": lambda folder, shape: load_letters(folder, *shape),
    "books": lambda folder, shape: load_books(folder, *shape),
    "an4": lambda folder, shape: load_an4(folder),
}
"""Data sets that are read from a folder."""


def load_dataset(name: str, folder: Path | str | None, shape: Shape) -> Data:
    """Return the data set `name` from `folder`, for a model that takes examples of `shape`.

    The embedded data sets ("digits", "novels", "phrases", "tones") need no folder.
    """
    if name in EMBEDDED:
        return EMBEDDED[name](shape)
    if name not in READERS:
        raise unknown("data set", name, [*EMBEDDED, *READERS])
    if folder is None:
        raise DataError(f"{name} is read from files: name their folder with --data-dir.")
    return READERS[name](Path(folder).expanduser(), shape)


def _with_shape(data: Dataset, shape: Shape) -> Dataset:
    """Return `data`, or raise if its images have another shape than the model takes."""
    if data.train.shape[1:] != shape:
        got = " x ".join(map(str, data.train.shape[1:]))
        want = " x ".join(map(str, shape))
        raise DataError(f"{data.name} has images of {got}, the model takes {want}.")
    return data


__all__ = [
    "EMBEDDED",
    "LETTERS",
    "READERS",
    "Data",
    "DataError",
    "Dataset",
    "Shard",
    "Speech",
    "Text",
    "load_dataset",
]
