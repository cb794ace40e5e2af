"""The embedded text: a made-up language with a known best possible perplexity."""

import torch

from gradwire.workbench.data.text import Text

WORDS, NEXT = 120, 6
"""Words of the language, and successors of each word."""
TRAIN, TEST = 24_000, 6_000
PERPLEXITY = 3.69
"""exp(entropy of the next word): no model can do better in the long run."""


def load_phrases(window: int) -> Text:
    """Return 30,000 words.

    Each word has six successors. Each successor is half as likely as the one before.
    """
    generator = torch.Generator().manual_seed(2014)
    successors = torch.stack(
        [torch.randperm(WORDS, dtype=torch.int64, generator=generator)[:NEXT] for _ in range(WORDS)]
    )
    choices = torch.multinomial(
        next_word_chances(), TRAIN + TEST, replacement=True, generator=generator
    )
    word, stream = 0, []
    for choice in choices.tolist():
        word = int(successors[word, choice])
        stream.append(word)
    words = torch.tensor(stream, dtype=torch.int64)
    return Text("phrases", words[:TRAIN], words[TRAIN:], WORDS, window)


def next_word_chances() -> torch.Tensor:
    """Return the probability of each successor of a word."""
    halves = 0.5 ** torch.arange(NEXT, dtype=torch.float32)
    return halves / halves.sum()
