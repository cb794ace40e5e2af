"""Texts of words, and Penn Treebank and WikiText-2 from their files; examples are windows."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from gradwire.workbench.data.dataset import DataError, read_utf8

END, UNKNOWN = "<eos>", "<unk>"

LAYOUTS = {
    "ptb": ("Penn Treebank", ("ptb", "simple-examples/data"), "ptb.{}.txt"),
    "wikitext2": ("WikiText-2", ("wikitext-2",), "wiki.{}.tokens"),
}
"""Title, usual folders and file pattern of each data set."""


@dataclass(frozen=True)
class Text:
    """A training and a test text as word numbers; a word may be a byte.

    Example i is the `window` words from word i * window on, and for each the word that follows.
    valid: a third text, to choose settings on.
    lengths: the bytes of each text by name, where words are not bytes.
    """

    name: str
    train: Tensor
    test: Tensor
    words: int
    window: int
    at_once: int = 50
    valid: Tensor | None = None
    lengths: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = {"training": self.train, "validation": self.valid, "test": self.test}
        for part, stream in parts.items():
            if stream is not None and len(stream) <= self.window:
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
        """Keywords that a network for this data set must be built with."""
        return {"words": self.words}

    def to(self, device: torch.device) -> "Text":
        """Return the same text on `device`."""
        valid = None if self.valid is None else self.valid.to(device)
        train, test = self.train.to(device), self.test.to(device)
        return replace(self, train=train, test=test, valid=valid)

    def tokens_per_byte(self, part: str) -> float:
        """Return the words of a text over its bytes: 1 where a word is a byte."""
        if part not in self.lengths:
            return 1.0
        stream: Tensor = getattr(self, part)
        return len(stream) / self.lengths[part]

    def training_batch(self, indices: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Return words and the words that follow, [n, window] each; `seed` is unused."""
        return self.windows(self.train, indices)

    def test_batch(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return test windows [start, stop)."""
        return self.windows(self.test, torch.arange(start, stop, dtype=torch.int64))

    def windows(self, stream: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the windows of these examples, and the same one word later, as int64."""
        within = torch.arange(self.window + 1, dtype=torch.int64, device=stream.device)
        words = stream[indices.to(stream.device)[:, None] * self.window + within].long()
        return words[:, :-1], words[:, 1:]


def load_text(name: str, folder: Path, window: int) -> Text:
    """Return the text `name` from `folder`, or from its usual folder in `folder`.

    Words are numbered by their first place in the training text. Each line ends with <eos>. A test
    word that the training text lacks is <unk>.
    """
    paths = [_find_file(name, folder, part) for part in ("train", "test")]
    train, test = (_read_words(path) for path in paths)
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


def _find_file(name: str, folder: Path, part: str) -> Path:
    """Return the path of a file, or raise an error that lists the places."""
    title, places, pattern = LAYOUTS[name]
    file = pattern.format(part)
    for place in (folder, *(folder / place for place in places)):
        if (place / file).is_file():
            return place / file
    raise DataError(
        f"no {file} in {folder} or {folder / places[0]}. {title} is the files "
        f"{pattern.format('train')}, {pattern.format('valid')} and {pattern.format('test')}, "
        "a line a sentence, words between spaces."
    )


def _read_words(path: Path) -> list[str]:
    """Return the words of a file, <eos> after each line."""
    return [word for line in read_utf8(path).splitlines() for word in (*line.split(), END)]
