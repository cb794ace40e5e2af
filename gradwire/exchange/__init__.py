"""Exchanges: from every rank's message to the same mean on every rank.

An exchange is a function `(message, u, group, memory, *, options...) -> Outcome`. Its file also
holds its costs, for the planner. An exchange keeps its state in `memory`, under keys that begin
with its name. To add an exchange, write it in a new file and name it in EXCHANGES.
"""

from gradwire.exchange.allgather import allgather, allgather_bytes, allgather_legs, allgather_rounds
from gradwire.exchange.dense import dense, dense_bytes, dense_rounds
from gradwire.exchange.dense_bf16 import dense_bf16, dense_bf16_bytes, dense_bf16_legs
from gradwire.exchange.exchange import Exchange, Outcome
from gradwire.exchange.gs_sgd import gs_sgd, gs_sgd_bytes, gs_sgd_legs, gs_sgd_rounds
from gradwire.exchange.gtopk import (
    gtopk,
    gtopk_bytes,
    gtopk_check,
    gtopk_legs,
    gtopk_received,
    gtopk_rounds,
    gtopk_work,
)
from gradwire.exchange.hierarchical import (
    hierarchical,
    hierarchical_bytes,
    hierarchical_legs,
    hierarchical_prepare,
    hierarchical_received,
    hierarchical_rounds,
    hierarchical_work,
)
from gradwire.exchange.means import ordered_rounds
from gradwire.exchange.oktopk import (
    oktopk,
    oktopk_bytes,
    oktopk_check,
    oktopk_legs,
    oktopk_received,
    oktopk_rounds,
)
from gradwire.exchange.sketch_size import SketchSize, sketch_prepare, sketch_suits, sketch_work
from gradwire.exchange.sketched import sketched, sketched_bytes, sketched_legs, sketched_rounds
from gradwire.exchange.union import union, union_bytes, union_legs, union_received, union_rounds

__all__ = ["EXCHANGES", "Exchange", "Outcome"]

_SUMMED = ("fp32", "bf16")
"""The values that an exchange can add up on the way."""

EXCHANGES: dict[str, Exchange] = {
    x.name: x
    for x in (
        Exchange(
            allgather,
            allgather_bytes,
            allgather_rounds,
            fills=True,
            stochastic=True,
            legs=allgather_legs,
            preference=4,
        ),
        Exchange(
            union,
            union_bytes,
            union_rounds,
            _SUMMED,
            adds_u=True,
            legs=union_legs,
            received=union_received,
            preference=5,
        ),
        Exchange(
            gtopk,
            gtopk_bytes,
            gtopk_rounds,
            check=gtopk_check,
            stochastic=True,
            legs=gtopk_legs,
            received=gtopk_received,
            work=gtopk_work,
            preference=1,
        ),
        Exchange(
            oktopk,
            oktopk_bytes,
            oktopk_rounds,
            check=oktopk_check,
            legs=oktopk_legs,
            received=oktopk_received,
            preference=2,
        ),
        Exchange(
            sketched,
            sketched_bytes,
            sketched_rounds,
            _SUMMED,
            chooses=True,
            check=SketchSize,
            prepare=sketch_prepare,
            legs=sketched_legs,
            work=sketch_work,
            suits=sketch_suits,
        ),
        Exchange(
            gs_sgd,
            gs_sgd_bytes,
            gs_sgd_rounds,
            _SUMMED,
            chooses=True,
            check=SketchSize,
            prepare=sketch_prepare,
            legs=gs_sgd_legs,
            work=sketch_work,
            suits=sketch_suits,
        ),
        Exchange(
            hierarchical,
            hierarchical_bytes,
            hierarchical_rounds,
            chooses=True,
            prepare=hierarchical_prepare,
            legs=hierarchical_legs,
            received=hierarchical_received,
            work=hierarchical_work,
            preference=3,
        ),
        Exchange(dense, dense_bytes, dense_rounds, ("fp32",), whole="fp32"),
        Exchange(
            dense_bf16,
            dense_bf16_bytes,
            ordered_rounds,
            ("fp32",),
            whole="bf16",
            legs=dense_bf16_legs,
        ),
    )
}
