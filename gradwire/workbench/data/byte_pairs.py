"""Byte-pair encoding of texts, with Hugging Face's tokenizers; kept in the user's cache folder."""

import hashlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.errors import ConfigError
from gradwire.state.saved.files import replace_file
from gradwire.workbench.data.dataset import DataError

SAMPLE = 2**24
"""Bytes at the beginning of the first text on which the encoding is trained."""
PIECE = 2**20
"""Bytes that are encoded at once. A piece ends at the end of a line."""
AT_ONCE = 32
"""Pieces that are encoded side by side, as many as a machine has cores for."""
LEAST, MOST = 257, 2**16
"""Tokens of an encoding: all bytes and one pair at least, and numbers of two bytes."""


def encode_texts(texts: Sequence[Tensor], vocabulary: int) -> list[Tensor]:
    """Return the tokens of texts of bytes. The encoding is trained on the first of them.

    Tokens are kept in the cache folder, because a text of 130 MB takes a minute.
    """
    if not LEAST <= vocabulary <= MOST:
        raise ConfigError(f"--vocabulary must be 0 or {LEAST} to {MOST:,}, got {vocabulary}.")
    file = _cache_file(texts, vocabulary)
    if file.is_file():
        return _read(file, len(texts))
    parts = _encode(texts, vocabulary)
    tokens = [torch.from_numpy(part.astype(np.int32)) for part in parts]
    arrays: dict[str, Any] = {f"text{i}": part for i, part in enumerate(parts)}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, lambda out: np.savez(out, **arrays))
    except OSError as error:
        # The next run encodes again.
        warnings.warn(f"{file} cannot be written: {error.strerror}", stacklevel=2)
    return tokens


def _cache_file(texts: Sequence[Tensor], vocabulary: int) -> Path:
    """Return the file for these texts and this number of tokens."""
    digest = hashlib.sha256(f"1 {vocabulary} {SAMPLE}".encode())
    for text in texts:
        digest.update(text.numpy().tobytes())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return folder / "gradwire" / f"tokens-{vocabulary}-{digest.hexdigest()[:16]}.npz"


def _read(file: Path, count: int) -> list[Tensor]:
    try:
        with np.load(file, allow_pickle=False) as saved:
            parts = [saved[f"text{i}"] for i in range(count)]
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise DataError(f"{file} cannot be read: {error}. Remove it.") from error
    return [torch.from_numpy(part.astype(np.int32)) for part in parts]


def _encode(texts: Sequence[Tensor], vocabulary: int) -> list[np.ndarray]:
    """Return the tokens of each text as uint16."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--vocabulary needs the package tokenizers: pip install 'gradwire[text]', or leave "
            "--vocabulary out for bytes."
        ) from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_pieces(texts[0][:SAMPLE]), trainer)
    if tokenizer.get_vocab_size() < vocabulary:
        raise DataError(
            f"the training text has only {tokenizer.get_vocab_size():,} different tokens: a "
            f"--vocabulary of {vocabulary:,} needs a longer text."
        )
    return [_numbers(tokenizer, _pieces(text)) for text in texts]


def _numbers(tokenizer: Any, pieces: Sequence[str]) -> np.ndarray:
    """Return the tokens of a text as uint16; pieces are encoded side by side."""
    parts = []
    for first in range(0, len(pieces), AT_ONCE):
        found = tokenizer.encode_batch_fast(pieces[first : first + AT_ONCE])
        parts += [np.array(encoding.ids, dtype=np.uint16) for encoding in found]
    return np.concatenate(parts)


def _pieces(text: Tensor) -> list[str]:
    """Return a text in pieces that end at line ends; bytes that are no UTF-8 are replaced."""
    content = text.numpy().tobytes()
    pieces, start = [], 0
    while start < len(content):
        end = content.find(b"\n", start + PIECE) + 1 or len(content)
        pieces.append(content[start:end].decode("utf-8", errors="replace"))
        start = end
    return pieces
