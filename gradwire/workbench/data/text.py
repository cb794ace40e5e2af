"""Words in a row: Penn Treebank and WikiText-2 from their text files, and windows of them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from gradwire.workbench.data.dataset import DataError

END, UNKNOWN = "<eos>", "<unk>"

PLACES = {
    "ptb": ("Penn Treebank", ("ptb", "simple-examples/data"), "ptb.{}.txt"),
    "wikitext2": ("WikiText-2", ("wikitext-2",), "wiki.{}.tokens"),
}
"""What the data set is called, the folders it is looked for in, and its files."""


@dataclass(frozen=True)
class Text:
    """A training and a test text as word numbers, int64.

    Example i is the window of `window` words from word i x `window` on, and the word after each.
    """

    name: str
    train: Tensor
    test: Tensor
    words: int
    window: int
    at_once: int = 50

    def __post_init__(self) -> None:
        for part, stream in (("training", self.train), ("test", self.test)):
            if len(stream) <= self.window:
                raise DataError(
                    f"{self.name}: the {part} text has {len(stream)} words, one window takes "
                    f"{self.window + 1}."
                )

    @property
    def examples(self) -> int:
        return (len(self.train) - 1) // self.window

    @property
    def test_examples(self) -> int:
        return (len(self.test) - 1) // self.window

    @property
    def network(self) -> Mapping[str, int]:
        """What a network has to be built with."""
        return {"words": self.words}

    def to(self, device: torch.device) -> "Text":
        """The same text on `device`."""
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    def training_batch(self, indices: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Words and the words after them, [n, window] each; nothing is drawn."""
        return self._windows(self.train, indices)

    def test_batch(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Test windows [start, stop)."""
        return self._windows(self.test, torch.arange(start, stop, dtype=torch.int64))

    def _windows(self, stream: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        within = torch.arange(self.window + 1, dtype=torch.int64, device=stream.device)
        found = stream[indices.to(stream.device)[:, None] * self.window + within]
        return found[:, :-1], found[:, 1:]


def load_text(name: str, folder: Path, window: int) -> Text:
    """The text `name` in `folder` or the folders it usually lies in.

    Words are numbered in the order in which the training text brings them; a line ends with <eos>.
    A test word that the training text lacks is <unk>.
    """
    paths = [_find(name, folder, part) for part in ("train", "test")]
    train, test = (_read(path) for path in paths)
    numbers = {word: i for i, word in enumerate(dict.fromkeys(train))}
    strange = next((word for word in test if word not in numbers), None)
    if strange is not None and UNKNOWN not in numbers:
        raise DataError(
            f"{paths[1]} has the word {strange!r}, {paths[0]} neither has it nor {UNKNOWN}. "
            "The files do not belong together; fetch them again."
        )
    unknown = numbers.get(UNKNOWN, 0)
    first, second = (
        torch.tensor([numbers.get(w, unknown) for w in p], dtype=torch.int64) for p in (train, test)
    )
    return Text(name, first, second, words=len(numbers), window=window)


def _find(name: str, folder: Path, part: str) -> Path:
    """Where the file is, or an error that says what was looked for."""
    title, places, pattern = PLACES[name]
    file = pattern.format(part)
    for place in (folder, *(folder / place for place in places)):
        if (place / file).is_file():
            return place / file
    raise DataError(
        f"no {file} in {folder} or {folder / places[0]}. {title} is the files "
        f"{pattern.format('train')}, {pattern.format('valid')} and {pattern.format('test')}, "
        "a line a sentence, words between spaces."
    )


def _read(path: Path) -> list[str]:
    """The words of a file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason}. Fetch it again.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).") from error
    return [word for line in lines for word in (*line.split(), END)]
