"""Texts as bytes or tokens, one file per part: a folder of books, or the embedded novels."""

import lzma
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradwire.errors import one_line
from gradwire.workbench.data.dataset import DataError
from gradwire.workbench.data.text import Text

BYTES = 256
"""Tokens of a text of bytes."""
PARTS = ("train", "valid", "test")
EMBEDDED_FOLDER = Path(__file__).parent / "embedded"


def load_books(folder: Path, window: int, vocabulary: int = 0) -> Text:
    """Return the texts train, valid and test in `folder`, or in its folder "books".

    Each is one file, "train.txt" or "train.txt.xz". Any text does. vocabulary: the number of tokens
    of a byte-pair encoding that is trained on the first text; 0 for bytes.
    """
    return _make_text("books", [_find_part(folder, part) for part in PARTS], window, vocabulary)


def load_novels(window: int, vocabulary: int = 0) -> Text:
    """Return the embedded novels, 684 kB to train on and 66 kB each to score on."""
    paths = [EMBEDDED_FOLDER / f"{part}.txt.xz" for part in PARTS]
    return _make_text("novels", paths, window, vocabulary)


def _make_text(name: str, paths: Sequence[Path], window: int, vocabulary: int) -> Text:
    train, valid, test = texts = [_read_bytes(path) for path in paths]
    if not vocabulary:
        return Text(name, train, test, BYTES, window, valid=valid)
    from gradwire.workbench.data.byte_pairs import encode_texts

    lengths = dict(zip(PARTS, map(len, texts), strict=True))
    train, valid, test = encode_texts(texts, vocabulary)
    return Text(name, train, test, vocabulary, window, valid=valid, lengths=lengths)


def _find_part(folder: Path, part: str) -> Path:
    """Return the path of a part, or raise an error that lists the places."""
    for place in (folder, folder / "books"):
        for name in (f"{part}.txt", f"{part}.txt.xz"):
            if (place / name).is_file():
                return place / name
    raise DataError(
        f"no {part}.txt or {part}.txt.xz in {folder} or {folder / 'books'}. The data set books is "
        f"any text in three files: {', '.join(f'{part}.txt' for part in PARTS)}."
    )


def _read_bytes(path: Path) -> Tensor:
    """Return the bytes of a text, uncompressed, as uint8."""
    try:
        content = path.read_bytes()
        if path.suffix == ".xz":
            content = lzma.decompress(content)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"{path} cannot be read: {one_line(error)}.") from error
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())
