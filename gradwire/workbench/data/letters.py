"""Tiny shakespeare, a text of letters, from its single file."""

from pathlib import Path

import torch

from gradwire.workbench.data.dataset import DataError, read_utf8
from gradwire.workbench.data.text import Text

TRAIN = 0.9
"""The share of the text to train on, as in char-rnn and nanoGPT. The rest is the test text."""


def load_letters(folder: Path, window: int) -> Text:
    """Return the letters of input.txt in `folder`, numbered in alphabetical order."""
    usual = folder / "tinyshakespeare" / "input.txt"
    path = next((p for p in (folder / "input.txt", usual) if p.is_file()), None)
    if path is None:
        raise DataError(
            f"no input.txt in {folder} or {usual.parent}. Tiny shakespeare is that one "
            "file of 1.1 MB, plain text."
        )
    text = read_utf8(path)
    letters = sorted(set(text))
    numbers = {letter: i for i, letter in enumerate(letters)}
    stream = torch.tensor([numbers[letter] for letter in text], dtype=torch.int64)
    split = int(TRAIN * len(stream))
    return Text("shakespeare", stream[:split], stream[split:], len(letters), window)
