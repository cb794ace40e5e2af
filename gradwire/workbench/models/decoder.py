"""GPTs for `gradwire study language`: decoders with RMSNorm, separate q, k and v, and an own head.

Separate matrices are what Muon is for: it makes the step of each matrix orthogonal, and a joint
matrix of q, k and v would be one. Names count the parameters of the blocks and of 256 tokens;
gpt-124m counts 50,304 tokens, whose embedding is the head too.
"""

import math
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.workbench.models.spec import Embedded, ModelSpec

HEAD_WIDTH = 64
"""Entries of a head of attention, unless the number of heads is given."""


class Block(nn.Module):
    """Causal self-attention, then an MLP of four times the width; each is added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.project = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        query, key, value = (
            layer(y).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x))))


class Decoder(nn.Module):
    """A decoder that scores the next token: tokens [n, time] to scores [n, time, words]."""

    def __init__(
        self, words: int, width: int, depth: int, heads: int, window: int, tied: bool
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.position = nn.Embedding(window, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def decoder(
    words: int = 256,
    width: int = 384,
    depth: int = 6,
    heads: int = 0,
    window: int = 512,
    tied: bool = False,
) -> nn.Module:
    """Return the decoder, with normal weights of deviation 0.02.

    Weights that end a branch are divided by sqrt(2 depth), as in GPT-2. heads: 0 for one per 64
    entries of the width.
    """
    model = Decoder(words, width, depth, heads or max(1, width // HEAD_WIDTH), window, tied)
    for name, values in model.named_parameters():
        if values.dim() > 1:
            ends = name.endswith(("project.weight", "narrow.weight"))
            nn.init.normal_(values, std=0.02 / (math.sqrt(2 * depth) if ends else 1))
    return model


TINY = {"width": 96, "depth": 3, "heads": 3}
"""The size for CPUs, 0.4 M parameters."""


def _spec(name: str, parameters: int, lr: float, **size: Any) -> ModelSpec:
    """Return the spec of a size; lr is AdamW's."""
    window = size.setdefault("window", 512)
    return ModelSpec(
        name=name,
        summary=f"{size['depth']} decoder blocks of {size['width']} for the bytes of texts",
        make=partial(decoder, **size),
        parameters=parameters,
        shape=(window,),
        batch=8 if window < 512 else 32,
        lr=lr,
        epochs=1,
        clip=1.0,
        task="bytes",
        data=("books",),
        optimizer="adamw",
        weight_decay=0.1,
        cosine=True,
        # The best of factors of 2, for one seed; neighbours on both sides are worse.
        embedded=Embedded("novels", batch=8, lr=8e-3, epochs=2, size=TINY, muon_lr=1.6e-2),
    )


SPECS = (
    _spec("gpt-tiny", 393_888, 4e-3, window=128, **TINY),
    _spec("gpt-11m", 11_015_040, 2e-3, width=384, depth=6),
    _spec("gpt-40m", 39_987_840, 1e-3, width=640, depth=8),
    _spec("gpt-85m", 85_740_288, 1e-3, width=768, depth=12),
    _spec("gpt-124m", 123_980_544, 1e-3, width=768, depth=12, words=50_304, tied=True),
)
