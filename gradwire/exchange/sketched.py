"""Workers add their sketches, find the large entries of the sum in it, and then send only those."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.encode import Encoding, Message
from gradwire.exchange.exchange import Outcome
from gradwire.exchange.means import ordered_bytes, ordered_legs, ordered_mean, ordered_rounds
from gradwire.exchange.sketch_size import Table, warn_if_blind
from gradwire.hashing import fmix32
from gradwire.kernels.select import block_size
from gradwire.ranks.group import Group
from gradwire.stages import stage
from gradwire.types import Entries, Memory, Sparse

if TYPE_CHECKING:
    from gradwire.plan.network import Leg, Network

Mean = Callable[[Tensor, torch.dtype, Group], tuple[Tensor, Tensor]]
STEPS = "sketch.steps"


def sketched(
    message: Message,
    u: Tensor,
    group: Group,
    memory: Memory,
    *,
    rows: int = Table.rows,
    columns: int = Table.columns,
    ratio: float = Table.ratio,
    candidates: int = Table.candidates,
) -> Outcome:
    """Sums of sketches say where all workers send exact values.

    Sketched-SGD of Ivkin et al. (2019), algorithm 3. 1. every worker puts u into a Count-Sketch of
    `rows` x `columns` cells, or of d / `ratio` cells; the mean of these is the sketch of the mean;
    2. every rank finds the same `candidates` x k largest estimates in it; 3. the exact mean there,
    of which the k largest are the update. Only exact values are delivered, so the law holds however
    bad the estimates are. Sends 2 (P - 1) / P of table and candidates, no indices.
    Different from the paper: the server's work is divided over the ranks (see `ordered_mean`), and
    the hashes change at every step, so that no entry stays hidden behind the same large ones.
    """
    sketch = Table(rows, columns, ratio, candidates)
    return by_sketch(message, u, group, memory, sketch, ordered_mean)


def by_sketch(
    message: Message, u: Tensor, group: Group, memory: Memory, sketch: Table, mean: Mean
) -> Outcome:
    """The two rounds, whichever way the mean is taken."""
    size, k, dtype = u.numel(), message.chosen.capacity, message.encoding.dtype
    if group.rank == 0 and k and STEPS not in memory:
        warn_if_blind(sketch, u, k)
    with stage("encode"):
        seeds = next_seeds(memory, sketch.rows, u.device)
        table = kernels.insert(u, sketch.width(size), seeds)
        broken = (1 - message.finite).float().view(1)
    cells, _ = mean(torch.cat([table.view(-1), broken]), dtype, group)
    with stage("compress"):
        ok = cells[-1] == 0
        many = sketch.many(size, k)
        where = largest(cells[:-1].view_as(table), seeds, size, many)
    exact, given = mean(u[where], dtype, group)
    with stage("decode"):
        best = kernels.topk(exact, min(k, many))
        update = u.new_empty(size + 1)
        kernels.start(update, ok)
        kernels.spread(update, where[best], exact[best])
        count = torch.full((), best.numel(), dtype=torch.int32, device=u.device)
    return Outcome(update, Entries(Sparse(where[best], given[best], count, size)), ok)


def next_seeds(memory: Memory, rows: int, device: torch.device) -> Tensor:
    """int32 [rows], other ones at every step, the same on every rank."""
    if STEPS not in memory:
        memory[STEPS] = torch.zeros((), dtype=torch.int64, device=device)
    steps = memory[STEPS]
    numbers = steps * rows + torch.arange(1, rows + 1, dtype=torch.int64, device=device)
    steps.add_(1)
    return fmix32(fmix32(numbers.to(torch.int32)) + 1)


def largest(table: Tensor, seeds: Tensor, size: int, many: int) -> Tensor:
    """int32, ascending: where the `many` largest estimates are."""
    # Sums beyond fp32 are infinite, and their differences have no size.
    table = table.nan_to_num()
    group = block_size(size, many, table.device)
    magnitudes, maxima = kernels.query(table, seeds, size, group)
    return kernels.topk(magnitudes, many, maxima, group)


def sketched_bytes(ranks: int, size: int, capacity: int, encoding: Encoding, **options: Any) -> int:
    """2 (P - 1) / P of the table's cells and of the candidates; one cell says who was finite."""
    sketch, itemsize = Table(**options), encoding.dtype.itemsize
    parts = sketch.cells(size) + 1, sketch.many(size, capacity)
    return sum(ordered_bytes(ranks, entries, itemsize) for entries in parts)


def sketched_rounds(ranks: int, **options: Any) -> int:
    """Two ordered means."""
    return 2 * ordered_rounds(ranks)


def sketched_legs(network: "Network", size: int, capacity: int, encoding: Encoding) -> "list[Leg]":
    """Two ordered means: of the cells, and of the candidates."""
    table, itemsize = Table(), encoding.dtype.itemsize
    cells = ordered_legs(network, table.cells(size) + 1, itemsize)
    return cells + ordered_legs(network, table.many(size, capacity), itemsize)
