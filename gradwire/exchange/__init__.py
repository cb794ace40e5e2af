"""Exchanges: from every rank's message to the same mean on every rank.

An exchange is a function `(message, u, group, memory, *, options...) -> Outcome`. Its file also
holds its costs, for the planner. An exchange keeps its state in `memory`, under keys that begin
with its name. To add an exchange, write it in a new file and name it in EXCHANGES.
"""

from gradwire.exchange.exchange import Exchange, Outcome
from gradwire.types import Registry

__all__ = ["EXCHANGES", "Exchange", "Outcome"]

EXCHANGES: Registry[Exchange] = Registry(
    {
        "allgather": "gradwire.exchange.allgather:EXCHANGE",
        "union": "gradwire.exchange.union:EXCHANGE",
        "gtopk": "gradwire.exchange.gtopk:EXCHANGE",
        "oktopk": "gradwire.exchange.oktopk:EXCHANGE",
        "sketched": "gradwire.exchange.sketched:EXCHANGE",
        "gs-sgd": "gradwire.exchange.gs_sgd:EXCHANGE",
        "owner": "gradwire.exchange.owner:EXCHANGE",
        "hierarchical": "gradwire.exchange.hierarchical:EXCHANGE",
        "dense": "gradwire.exchange.dense:EXCHANGE",
        "dense-bf16": "gradwire.exchange.dense_bf16:EXCHANGE",
    }
)
