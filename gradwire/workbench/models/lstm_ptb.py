"""LSTM-PTB: a word model of two layers of 1500, 66,034,000 parameters with 10,000 words.

The "large" network of Zaremba et al. (2014) with dropout 0.65; embedding and decoder share no
weights. Shi et al. (2019) give momentum 0.9 for all their networks, but their code uses none for
this network. With momentum 0.9 at their learning rate of 22, the loss does not fall, and nearly all
of the gradient is in a few entries.
"""

from torch import Tensor, nn

from gradwire.workbench.models.initialise import uniform_
from gradwire.workbench.models.spec import Embedded, ModelSpec


class WordModel(nn.Module):
    """A network that scores the next word: tokens [n, time] to scores [n, time, words].

    Each window starts from a zero state, so a step depends on nothing but its examples.
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
    """Return the word model, with uniform weights in [-0.04, 0.04], or wider for fewer units."""
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
