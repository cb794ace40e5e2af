"""AN4: names, addresses and numbers read aloud, from wav files and two lists."""

import io
import wave
from pathlib import Path

import torch
from torch import Tensor

from gradwire.errors import one_line
from gradwire.workbench.data.dataset import DataError
from gradwire.workbench.data.speech import RATE, Speech, classes

LAYOUT = "AN4 is the lists train.tsv and test.tsv (file, tab, transcript) beside the wav files."


def load_an4(folder: Path) -> Speech:
    """948 + 130 utterances of 16 kHz; the lists are here or in an4/."""
    return Speech("an4", *_part(folder, "train"), *_part(folder, "test"))


def _part(folder: Path, part: str) -> tuple[list[Tensor], list[Tensor]]:
    """The sounds and letters of one list."""
    places = (folder, folder / "an4")
    index = next((p / f"{part}.tsv" for p in places if (p / f"{part}.tsv").is_file()), None)
    if index is None:
        raise DataError(f"no {part}.tsv in {folder} or {folder / 'an4'}. {LAYOUT}")
    sounds, letters = [], []
    for number, line in enumerate(_lines(index), start=1):
        name, tab, text = line.partition("\t")
        if not tab or not text.strip() or not name.strip("\0/. "):
            raise DataError(f"{index}, line {number}: no transcript in {line!r}. {LAYOUT}")
        sounds.append(read_wav(index.parent / name))
        letters.append(classes(text.strip().upper(), f"{index}, line {number}"))
    if not sounds:
        raise DataError(f"{index} is empty. {LAYOUT}")
    return sounds, letters


def _lines(index: Path) -> list[str]:
    try:
        return index.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{index} is not UTF-8 text: {error.reason}. Fetch it again.") from error
    except OSError as error:
        raise DataError(f"{index} cannot be read ({error.strerror}).") from error


def read_wav(path: Path) -> Tensor:
    """The samples of a 16 kHz mono file of 16-bit PCM."""
    try:
        # From memory: of a file the reader would take room for what a damaged header promises.
        with wave.open(io.BytesIO(path.read_bytes()), "rb") as file:
            kind = (file.getnchannels(), 8 * file.getsampwidth(), file.getframerate())
            raw = file.readframes(file.getnframes())
            promised = file.getnframes() * file.getnchannels() * file.getsampwidth()
    except FileNotFoundError:
        raise DataError(f"no {path}. {LAYOUT}") from None
    except Exception as error:  # the reader of waves raises many kinds
        raise DataError(f"{path} is not a wav file: {one_line(error)}. Fetch it again.") from error
    if kind != (1, 16, RATE):
        raise DataError(
            f"{path} has {kind[0]} channels of {kind[1]} bits at {kind[2]} Hz; "
            f"it takes 1 of 16 at {RATE}."
        )
    if not promised or len(raw) != promised:
        raise DataError(f"{path} holds {len(raw):,} bytes of {promised:,}. Fetch it again.")
    return torch.frombuffer(bytearray(raw), dtype=torch.int16)
