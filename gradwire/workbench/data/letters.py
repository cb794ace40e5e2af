"""Letters in a row: tiny shakespeare from its one file."""

from pathlib import Path

import torch

from gradwire.workbench.data.dataset import DataError
from gradwire.workbench.data.text import Text

TRAIN = 0.9
"""The share of the text that is trained on, as in char-rnn and nanoGPT; the rest is the test."""


def load_letters(folder: Path, window: int) -> Text:
    """tinyshakespeare/input.txt in `folder`, letter by letter, numbered in alphabetical order."""
    path = next((p for p in (folder / "input.txt", _usual(folder)) if p.is_file()), None)
    if path is None:
        raise DataError(
            f"no input.txt in {folder} or {_usual(folder).parent}. Tiny shakespeare is that one "
            "file of 1.1 MB, plain text."
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason}. Fetch it again.") from error
    letters = sorted(set(text))
    numbers = {letter: i for i, letter in enumerate(letters)}
    stream = torch.tensor([numbers[letter] for letter in text], dtype=torch.int64)
    split = int(TRAIN * len(stream))
    return Text("shakespeare", stream[:split], stream[split:], len(letters), window)


def _usual(folder: Path) -> Path:
    return folder / "tinyshakespeare" / "input.txt"
