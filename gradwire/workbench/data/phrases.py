"""Embedded text: a made-up language whose best possible perplexity is known."""

import torch

from gradwire.workbench.data.text import Text

WORDS, NEXT = 120, 6
TRAIN, TEST = 24_000, 6_000
PERPLEXITY = 3.69
"""exp of the entropy of the next word: no model can do better in the long run."""


def load_phrases(window: int) -> Text:
    """30,000 words, each followed by one of six that depend on it, half as likely one by one."""
    draw = torch.Generator().manual_seed(2014)
    after = torch.stack(
        [torch.randperm(WORDS, dtype=torch.int64, generator=draw)[:NEXT] for _ in range(WORDS)]
    )
    choices = torch.multinomial(chances(), TRAIN + TEST, replacement=True, generator=draw)
    word, stream = 0, []
    for choice in choices.tolist():
        word = int(after[word, choice])
        stream.append(word)
    words = torch.tensor(stream, dtype=torch.int64)
    return Text("phrases", words[:TRAIN], words[TRAIN:], WORDS, window)


def chances() -> torch.Tensor:
    """How likely each of the words that may follow is."""
    halves = 0.5 ** torch.arange(NEXT, dtype=torch.float32)
    return halves / halves.sum()
