"""LSTM-PTB: a word model of two layers of 1500, 66,034,000 parameters with 10,000 words.

Zaremba et al. (2014), "large", with dropout 0.65; the embedding and the decoder share nothing. Shi
et al. (2019) say momentum 0.9 of all their networks; their code has none here. With it, at their
learning rate of 22, the loss does not fall, and nearly all of the gradient is in a few entries.
"""

from torch import Tensor, nn

from gradwire.workbench.models.initialise import uniform_
from gradwire.workbench.models.spec import Embedded, ModelSpec


class WordModel(nn.Module):
    """The scores of the next word after each word: tokens [n, time] to scores [n, time, words].

    Every window starts from a zero state: a step depends on nothing but its own examples.
    """

    def __init__(self, words: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.drop = nn.Dropout(dropout)
        self.lstm = nn.LSTM(hidden, hidden, layers, dropout=dropout, batch_first=True)
        self.decoder = nn.Linear(hidden, words)

    def forward(self, tokens: Tensor) -> Tensor:
        out, _ = self.lstm(self.drop(self.embedding(tokens)))
        return self.decoder(self.drop(out))


def lstm_ptb(
    words: int = 10_000, hidden: int = 1500, layers: int = 2, dropout: float = 0.65
) -> nn.Module:
    """The word model, its weights uniform in [-0.04, 0.04] (wider for fewer units)."""
    return uniform_(WordModel(words, hidden, layers, dropout), bound=0.04 * (1500 / hidden) ** 0.5)


SPEC = ModelSpec(
    name="lstm-ptb",
    summary="two LSTM layers of 1500 for words",
    make=lstm_ptb,
    parameters=66_034_000,
    shape=(35,),
    batch=20,
    lr=22.0,
    epochs=40,
    momentum=0.0,
    clip=0.25,
    task="language",
    data=("ptb", "wikitext2"),
    embedded=Embedded("phrases", batch=20, lr=2.0, epochs=10, size={"hidden": 64, "dropout": 0.0}),
)
