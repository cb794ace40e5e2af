"""The embedded speech: each letter is a tone."""

import torch
from torch import Tensor

from gradwire.workbench.data.speech import RATE, Speech, letter_numbers

ALPHABET = "ABCDEFGH"
TRAIN, TEST = 240, 60
SECONDS = 0.15


def load_tones() -> Speech:
    """Return 300 words of two to five letters; letter n is a tone of 300 (n + 1) Hz with noise."""
    generator = torch.Generator().manual_seed(1991)
    spoken = [_utterance(generator) for _ in range(TRAIN + TEST)]
    sounds, letters = [list(part) for part in zip(*spoken, strict=True)]
    return Speech("tones", sounds[:TRAIN], letters[:TRAIN], sounds[TRAIN:], letters[TRAIN:])


def _utterance(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the sound and the class numbers of a random word."""
    count = int(torch.randint(2, 6, (), dtype=torch.int64, generator=generator))
    chosen = torch.randint(len(ALPHABET), (count,), dtype=torch.int64, generator=generator).tolist()
    time = torch.arange(int(SECONDS * RATE), dtype=torch.float32) / RATE
    silence = torch.zeros(RATE // 20, dtype=torch.float32)
    parts = [silence]
    for letter in chosen:
        parts += [torch.sin(2 * torch.pi * 300 * (letter + 1) * time), silence]
    sound = torch.cat(parts)
    sound += 0.05 * torch.randn(len(sound), dtype=torch.float32, generator=generator)
    word = "".join(ALPHABET[letter] for letter in chosen)
    return (8000 * sound).to(torch.int16), letter_numbers(word, "tones")
