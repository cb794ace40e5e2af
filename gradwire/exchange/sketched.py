"""Sketched-SGD: workers add their sketches, find the sum's large entries, and send these."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.encode import Encoding, Message
from gradwire.exchange.exchange import SUMMED, Exchange, Outcome
from gradwire.exchange.means import ordered_bytes, ordered_legs, ordered_mean, ordered_rounds
from gradwire.exchange.sketch_server import mean_by_server, server_bytes, server_rounds
from gradwire.exchange.sketch_size import SketchSize, sketch_suits, sketch_work
from gradwire.exchange.sketch_table import find_largest, next_seeds, warn_if_small
from gradwire.ranks.group import Group
from gradwire.stages import stage
from gradwire.types import Entries, Memory, Sparse

if TYPE_CHECKING:
    from gradwire.plan.network import Leg, Network

_Mean = Callable[[Tensor, torch.dtype, Group], tuple[Tensor, Tensor]]
"""(values, dtype, group) -> (mean, contribution)."""


def sketched(
    message: Message,
    u: Tensor,
    group: Group,
    memory: Memory,
    *,
    rows: int = SketchSize.rows,
    columns: int = SketchSize.columns,
    ratio: float = SketchSize.ratio,
    candidates: int = SketchSize.candidates,
    server: bool = False,
) -> Outcome:
    """Sums of sketches tell at which entries all workers send exact values.

    Sketched-SGD of Ivkin et al. (2019), algorithm 3:
    1. Every worker puts u into a Count-Sketch of `rows` x `columns` cells, or of d / `ratio` cells.
       The mean of the sketches is the sketch of the mean.
    2. Every rank finds the same `candidates` x k largest estimates in it.
    3. The workers take the exact mean at these entries. Its k largest entries are the update.

    Only exact values are delivered, so the law holds however bad the estimates are. A rank sends 2
    (P - 1) / P of the cells and candidates, and no indices.
    server: True: rank 0 does the adding and choosing alone, as in the paper. A worker sends its
    sketch and its exact values to it; see `mean_by_server`.
    candidates: 0: P of them for each of the k, as in the paper.
    Different from the paper: without `server` its work is divided over the ranks (see
    `ordered_mean`). The hashes change at every step, so that no entry stays hidden behind the same
    large ones.
    """
    sketch = SketchSize(rows, columns, ratio, candidates)
    if server:
        warn_if_small(sketch, u, message.chosen.capacity, group, memory)
        return mean_by_server(message, u, group, memory, sketch)
    return mean_by_sketch(message, u, group, memory, sketch, ordered_mean)


def mean_by_sketch(
    message: Message, u: Tensor, group: Group, memory: Memory, sketch: SketchSize, mean: _Mean
) -> Outcome:
    """Return the outcome of the two rounds; `mean` is the way of averaging."""
    size, k, dtype = u.numel(), message.chosen.capacity, message.encoding.dtype
    warn_if_small(sketch, u, k, group, memory)
    with stage("encode"):
        seeds = next_seeds(memory, sketch.rows, u.device)
        table = kernels.insert(u, sketch.column_count(size), seeds)
        broken = (1 - message.finite).float().view(1)
    cells, _ = mean(torch.cat([table.view(-1), broken]), dtype, group)
    with stage("compress"):
        ok = cells[-1] == 0
        candidates = sketch.candidate_count(size, k, group.size)
        indices = find_largest(cells[:-1].view_as(table), seeds, size, candidates)
    exact, contribution = mean(u[indices], dtype, group)
    with stage("decode"):
        best = kernels.topk(exact, min(k, candidates))
        update = u.new_empty(size + 1)
        kernels.reset_mean(update, ok)
        kernels.add_entries(update, indices[best], exact[best])
        count = torch.full((), best.numel(), dtype=torch.int32, device=u.device)
    return Outcome(update, Entries(Sparse(indices[best], contribution[best], count, size)), ok)


def _size_and_server(options: Mapping[str, Any]) -> tuple[SketchSize, bool]:
    """Return the size of the table, and True if there is a server."""
    given = dict(options)
    server = given.pop("server", False)
    return SketchSize(**given), server


def sketched_bytes(ranks: int, size: int, capacity: int, encoding: Encoding, **options: Any) -> int:
    """Return the bytes that leave one rank: 2 (P - 1) / P of the cells and of the candidates.

    One more cell tells if a rank was not finite. With a server see `server_bytes`.
    """
    sketch, server = _size_and_server(options)
    if server:
        return server_bytes(ranks, size, capacity, encoding, sketch)
    itemsize = encoding.dtype.itemsize
    parts = sketch.cell_count(size) + 1, sketch.candidate_count(size, capacity, ranks)
    return sum(ordered_bytes(ranks, entries, itemsize) for entries in parts)


def sketched_rounds(ranks: int, **options: Any) -> int:
    """Return the rounds of two ordered means, or those of the server."""
    if _size_and_server(options)[1]:
        return server_rounds(ranks)
    return 2 * ordered_rounds(ranks)


def sketched_legs(network: "Network", size: int, capacity: int, encoding: Encoding) -> "list[Leg]":
    """Return the legs of two ordered means: of the cells, and of the candidates."""
    sketch, itemsize = SketchSize(), encoding.dtype.itemsize
    cells = ordered_legs(network, sketch.cell_count(size) + 1, itemsize)
    return cells + ordered_legs(
        network, sketch.candidate_count(size, capacity, network.workers), itemsize
    )


EXCHANGE = Exchange(
    sketched,
    sketched_bytes,
    sketched_rounds,
    SUMMED,
    chooses=True,
    check=lambda **options: _size_and_server(options),
    legs=sketched_legs,
    work=sketch_work,
    suits=sketch_suits,
)
