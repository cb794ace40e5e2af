"""Utterances and their transcripts, as spectrograms and letters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradwire.workbench.data.dataset import DataError

RATE = 16_000
FRAME, HOP = 320, 160
"""Samples of a window and between windows: 20 ms every 10 ms, 161 frequencies of 50 Hz."""

LETTERS = "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ "
"""Class 0 is CTC's blank."""

CPU = torch.device("cpu")

Batch = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Speech:
    """Training and test utterances: sound int16, letters as class numbers.

    A batch is (spectrograms [n, 161, frames], the frames of each, the letters of all in a row, the
    number of letters of each).
    """

    name: str
    train: Sequence[Tensor]
    train_letters: Sequence[Tensor]
    test: Sequence[Tensor]
    test_letters: Sequence[Tensor]
    device: torch.device = CPU
    at_once: int = 20

    def __post_init__(self) -> None:
        for part, sounds in (("training", self.train), ("test", self.test)):
            short = next((i for i, sound in enumerate(sounds) if len(sound) < FRAME), None)
            if short is not None:
                raise DataError(
                    f"{self.name}: {part} utterance {short} has {len(sounds[short])} samples, "
                    f"one frame takes {FRAME}."
                )

    @property
    def examples(self) -> int:
        return len(self.train)

    @property
    def test_examples(self) -> int:
        return len(self.test)

    @property
    def network(self) -> Mapping[str, Any]:
        """Keywords that a network for this data set must be built with."""
        return {}

    def to(self, device: torch.device) -> "Speech":
        """Return the same utterances; each batch is moved to `device` and transformed there."""
        parts = self.train, self.train_letters, self.test, self.test_letters
        return Speech(self.name, *parts, device=device)

    def training_batch(self, indices: Tensor, seed: int) -> Batch:
        """Return spectrograms and letters; `seed` is unused, because nothing is drawn."""
        chosen = indices.tolist()
        return self._batch([self.train[i] for i in chosen], [self.train_letters[i] for i in chosen])

    def test_batch(self, start: int, stop: int) -> Batch:
        """Return test utterances [start, stop)."""
        return self._batch(self.test[start:stop], self.test_letters[start:stop])

    def _batch(self, sounds: Sequence[Tensor], letters: Sequence[Tensor]) -> Batch:
        """Return the batch of these utterances, padded with zeros to the longest."""
        pictures = [spectrogram(sound.to(self.device)) for sound in sounds]
        frames = [picture.shape[1] for picture in pictures]
        padded = [F.pad(p, (0, max(frames) - p.shape[1])) for p in pictures]
        counts = torch.tensor([len(part) for part in letters], dtype=torch.int64)
        classes = torch.cat(list(letters)).to(self.device)
        lengths = torch.tensor(frames, dtype=torch.int64, device=self.device)
        return torch.stack(padded), lengths, classes, counts


def spectrogram(sound: Tensor) -> Tensor:
    """Return log(1 + magnitude) of the Fourier transform of Hamming windows, [161, frames].

    Frame t is centred on sample 160 t. The result has zero mean and unit deviation.
    """
    window = torch.hamming_window(FRAME, dtype=torch.float32, device=sound.device)
    waves = torch.stft(sound.float(), FRAME, HOP, window=window, return_complex=True)
    loud = waves.abs().log1p()
    return (loud - loud.mean()) / (loud.std() + 1e-6)


def letter_numbers(text: str, place: str) -> Tensor:
    """Return the class numbers of a transcript; `place` names it in an error."""
    strange = sorted(set(text) - set(LETTERS[1:]))
    if strange:
        raise DataError(f"{place}: the transcript has {strange[0]!r}, letters are {LETTERS[1:]!r}.")
    return torch.tensor([LETTERS.index(letter) for letter in text], dtype=torch.int64)
