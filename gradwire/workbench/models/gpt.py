"""GPT-nano, six decoder blocks of width 384, and GPT-micro, one block of width 48 for CPUs.

GPT-nano has 10,745,088 parameters with 65 letters. The network is that of Radford et al. (2019)
in the size of nanoGPT's example on tiny shakespeare: learned positions, norms before attention and
MLP, GELU, no biases, dropout 0.2. Embedding and output share their weights.
"""

import math
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.workbench.models.spec import Embedded, ModelSpec


class Attention(nn.Module):
    """Causal self-attention: each position sees itself and the positions before."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.mix = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n, time, width = x.shape
        split = self.mix(x).view(n, time, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.project(out.transpose(1, 2).reshape(n, time, width))


class DecoderBlock(nn.Module):
    """Attention, then an MLP of four times the width; each is added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.project = nn.Linear(4 * width, width, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.project(F.gelu(self.widen(self.norm2(x)))))


class GPT(nn.Module):
    """A decoder that scores the next word: tokens [n, time] to scores [n, time, words]."""

    def __init__(
        self, words: int, width: int, layers: int, heads: int, dropout: float, window: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        # In the dtype and on the device of the layers.
        weight = self.embedding.weight
        self.position = nn.Parameter(weight.new_empty(window, width))
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embedding(tokens) + self.position[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


def gpt_nano(
    words: int = 65,
    width: int = 384,
    layers: int = 6,
    heads: int = 6,
    dropout: float = 0.2,
    window: int = 256,
) -> nn.Module:
    """Return the decoder, with normal weights of deviation 0.02.

    Weights that end a branch are divided by sqrt(2 layers), as in GPT-2.
    """
    model = GPT(words, width, layers, heads, dropout, window)
    for name, values in model.named_parameters():
        if values.dim() > 1:
            ends = name.endswith("project.weight")
            nn.init.normal_(values, std=0.02 / (math.sqrt(2 * layers) if ends else 1))
    return model


SPEC = ModelSpec(
    name="gpt-nano",
    summary="six decoder blocks of 384 for letters or words",
    make=gpt_nano,
    parameters=10_745_088,
    shape=(256,),
    batch=16,
    lr=1e-3,
    epochs=20,
    clip=1.0,
    task="language",
    data=("shakespeare", "wikitext2", "ptb"),
    optimizer="adamw",
    embedded=Embedded(
        "phrases",
        batch=4,
        lr=3e-3,
        epochs=10,
        size={"width": 64, "layers": 2, "heads": 2, "dropout": 0.0},
    ),
)

MICRO = ModelSpec(
    name="gpt-micro",
    summary="one decoder block of 48 for letters or words, windows of 32",
    make=partial(gpt_nano, width=48, layers=1, heads=2, dropout=0.0, window=32),
    parameters=32_448,
    shape=(32,),
    batch=32,
    lr=5e-3,
    epochs=20,
    clip=1.0,
    task="language",
    data=("shakespeare", "wikitext2"),
    optimizer="adamw",
    embedded=Embedded("phrases", batch=4, lr=5e-3, epochs=10),
)
