"""AN4: names, addresses and numbers read aloud, from wav files and two lists."""

import io
import wave
from pathlib import Path

import torch
from torch import Tensor

from gradwire.errors import one_line
from gradwire.workbench.data.dataset import DataError, read_utf8
from gradwire.workbench.data.speech import RATE, Speech, letter_numbers

LAYOUT = "AN4 is the lists train.tsv and test.tsv (file, tab, transcript) beside the wav files."


def load_an4(folder: Path) -> Speech:
    """Return 948 + 130 utterances of 16 kHz; the lists lie in `folder` or in its an4/."""
    return Speech("an4", *_read_part(folder, "train"), *_read_part(folder, "test"))


def _read_part(folder: Path, part: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return the sounds and the letters of one list."""
    candidates = (folder / f"{part}.tsv", folder / "an4" / f"{part}.tsv")
    index = next((path for path in candidates if path.is_file()), None)
    if index is None:
        raise DataError(f"no {part}.tsv in {folder} or {folder / 'an4'}. {LAYOUT}")
    sounds, letters = [], []
    for number, line in enumerate(read_utf8(index).splitlines(), start=1):
        name, tab, text = line.partition("\t")
        # Dots, slashes and zero bytes alone are no file name.
        if not tab or not text.strip() or not name.strip("\0/. "):
            raise DataError(f"{index}, line {number}: no transcript in {line!r}. {LAYOUT}")
        sounds.append(read_wav(index.parent / name))
        letters.append(letter_numbers(text.strip().upper(), f"{index}, line {number}"))
    if not sounds:
        raise DataError(f"{index} is empty. {LAYOUT}")
    return sounds, letters


def read_wav(path: Path) -> Tensor:
    """Return the samples of a 16 kHz mono file of 16-bit PCM."""
    try:
        # From memory: on a file, the reader would allocate all that a damaged header promises.
        with wave.open(io.BytesIO(path.read_bytes()), "rb") as file:
            kind = (file.getnchannels(), 8 * file.getsampwidth(), file.getframerate())
            raw = file.readframes(file.getnframes())
            promised = file.getnframes() * file.getnchannels() * file.getsampwidth()
    except FileNotFoundError:
        raise DataError(f"no {path}. {LAYOUT}") from None
    except Exception as error:  # the wave module raises many kinds
        raise DataError(f"{path} is not a wav file: {one_line(error)}. Fetch it again.") from error
    if kind != (1, 16, RATE):
        raise DataError(
            f"{path} has {kind[0]} channels of {kind[1]} bits at {kind[2]} Hz; "
            f"it takes 1 of 16 at {RATE}."
        )
    if not promised or len(raw) != promised:
        raise DataError(f"{path} holds {len(raw):,} bytes of {promised:,}. Fetch it again.")
    return torch.frombuffer(bytearray(raw), dtype=torch.int16)
