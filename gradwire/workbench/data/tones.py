"""Embedded speech: every letter is a tone."""

import torch
from torch import Tensor

from gradwire.workbench.data.speech import RATE, Speech, classes

ALPHABET = "ABCDEFGH"
TRAIN, TEST = 240, 60
SECONDS = 0.15


def load_tones() -> Speech:
    """300 words of two to five letters; letter n sounds at 300 (n + 1) Hz, noise under all."""
    draw = torch.Generator().manual_seed(1991)
    spoken = [_utterance(draw) for _ in range(TRAIN + TEST)]
    sounds, letters = [list(part) for part in zip(*spoken, strict=True)]
    return Speech("tones", sounds[:TRAIN], letters[:TRAIN], sounds[TRAIN:], letters[TRAIN:])


def _utterance(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    count = int(torch.randint(2, 6, (), dtype=torch.int64, generator=draw))
    chosen = torch.randint(len(ALPHABET), (count,), dtype=torch.int64, generator=draw).tolist()
    time = torch.arange(int(SECONDS * RATE), dtype=torch.float32) / RATE
    silence = torch.zeros(RATE // 20, dtype=torch.float32)
    parts = [silence]
    for letter in chosen:
        parts += [torch.sin(2 * torch.pi * 300 * (letter + 1) * time), silence]
    sound = torch.cat(parts)
    sound += 0.05 * torch.randn(len(sound), dtype=torch.float32, generator=draw)
    word = "".join(ALPHABET[letter] for letter in chosen)
    return (8000 * sound).to(torch.int16), classes(word, "tones")
