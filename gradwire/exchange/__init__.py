"""How workers agree: every rank's message -> the same mean everywhere.

An exchange is a function `(message, u, group, memory, *, options...) -> Outcome`; beside it stands
what it costs. What it remembers it keeps in `memory`, under keys that begin with its name. To add
one, write it in a file of its own and name it in EXCHANGES.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradwire.encode.values import VALUES
from gradwire.exchange.allgather import allgather, allgather_bytes, allgather_rounds
from gradwire.exchange.dense import dense, dense_bytes, dense_rounds
from gradwire.exchange.dense_bf16 import dense_bf16, dense_bf16_bytes
from gradwire.exchange.gs_sgd import gs_sgd, gs_sgd_bytes, gs_sgd_rounds
from gradwire.exchange.gtopk import gtopk, gtopk_bytes, gtopk_check, gtopk_rounds
from gradwire.exchange.hierarchical import (
    hierarchical,
    hierarchical_bytes,
    hierarchical_prepare,
    hierarchical_rounds,
)
from gradwire.exchange.means import ordered_rounds
from gradwire.exchange.oktopk import oktopk, oktopk_bytes, oktopk_check, oktopk_rounds
from gradwire.exchange.outcome import Outcome
from gradwire.exchange.sketch_size import Table, table_prepare
from gradwire.exchange.sketched import sketched, sketched_bytes, sketched_rounds
from gradwire.exchange.union import union, union_bytes, union_rounds

__all__ = ["EXCHANGES", "Exchange", "Outcome"]

SUMMED = ("fp32", "bf16")


@dataclass(frozen=True)
class Exchange:
    """A way of agreeing: its function, and what it costs."""

    run: Callable[..., Outcome]
    bytes: Callable[..., int]
    """(ranks, size, capacity, encoding, options...) -> the most bytes that leave one rank."""
    rounds: Callable[..., int]
    """(ranks, options...) -> how often a rank waits for another, with ring collectives."""
    values: tuple[str, ...] = tuple(VALUES)
    """How values may travel."""
    chooses: bool = False
    """Whether it looks at u itself, for the largest of the sum; the message only says how many."""
    check: Callable[..., object] | None = None
    """(options...): raises for a value that cannot work, whatever the model and the ranks."""
    prepare: Callable[..., None] | None = None
    """(group, size, capacity, options...): raises for what cannot work; called by all ranks."""
    fills: bool = False
    """Whether it takes the pieces that the mean is to be written to, as a last argument."""

    @property
    def name(self) -> str:
        return self.run.__name__.replace("_", "-")

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.run) or "").splitlines()[0]

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """The keyword-only arguments of the function, with their defaults."""
        parameters = inspect.signature(self.run).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


EXCHANGES: dict[str, Exchange] = {
    x.name: x
    for x in (
        Exchange(allgather, allgather_bytes, allgather_rounds, fills=True),
        Exchange(union, union_bytes, union_rounds, SUMMED),
        Exchange(gtopk, gtopk_bytes, gtopk_rounds, check=gtopk_check),
        Exchange(oktopk, oktopk_bytes, oktopk_rounds, check=oktopk_check),
        Exchange(sketched, sketched_bytes, sketched_rounds, SUMMED, True, Table, table_prepare),
        Exchange(gs_sgd, gs_sgd_bytes, gs_sgd_rounds, SUMMED, True, Table, table_prepare),
        Exchange(
            hierarchical,
            hierarchical_bytes,
            hierarchical_rounds,
            chooses=True,
            prepare=hierarchical_prepare,
        ),
        Exchange(dense, dense_bytes, dense_rounds, ("fp32",)),
        Exchange(dense_bf16, dense_bf16_bytes, ordered_rounds, ("fp32",)),
    )
}
