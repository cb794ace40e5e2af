"""How workers agree: every rank's message -> the same mean everywhere.

An exchange is a function `(message, u, group) -> Outcome`; beside it stands what
it costs. To add one, write it in a file of its own and name it in EXCHANGES.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from gradwire.encode import Encoding
from gradwire.exchange.allgather import allgather, allgather_bytes
from gradwire.exchange.dense import dense, dense_bytes
from gradwire.exchange.dense_bf16 import dense_bf16, dense_bf16_bytes
from gradwire.exchange.gtopk import gtopk, gtopk_bytes
from gradwire.exchange.outcome import Outcome
from gradwire.exchange.union import union, union_bytes

__all__ = ["EXCHANGES", "Exchange", "Outcome"]


@dataclass(frozen=True)
class Exchange:
    """A way of agreeing: its function, and the bytes that leave one rank."""

    run: Callable[..., Outcome]
    bytes: Callable[[int, int, int, Encoding], int]
    """(ranks, size, capacity, encoding) -> bytes that leave one rank."""

    @property
    def name(self) -> str:
        return self.run.__name__.replace("_", "-")

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.run) or "").splitlines()[0]


EXCHANGES: dict[str, Exchange] = {
    x.name: x
    for x in (
        Exchange(allgather, allgather_bytes),
        Exchange(union, union_bytes),
        Exchange(gtopk, gtopk_bytes),
        Exchange(dense, dense_bytes),
        Exchange(dense_bf16, dense_bf16_bytes),
    )
}
