"""Sketched-SGD with a server: rank 0 adds the sketches, asks for exact values, and answers."""

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.encode import Encoding, Message
from gradwire.exchange.exchange import Outcome
from gradwire.exchange.sketch_size import SketchSize
from gradwire.exchange.sketch_table import find_largest, next_seeds
from gradwire.kernels import mean
from gradwire.ranks.group import Group
from gradwire.stages import stage
from gradwire.types import Entries, Memory, Sparse


def mean_by_server(
    message: Message, u: Tensor, group: Group, memory: Memory, sketch: SketchSize
) -> Outcome:
    """Return the outcome of four messages between each worker and rank 0, which works too.

    1. Every worker sends its sketch to rank 0, which adds them in rank order.
    2. Rank 0 sends the indices of the largest estimates to every worker.
    3. Every worker sends its exact values there.
    4. Rank 0 sends the k largest of their mean, and where they are.
    """
    size, k, dtype = u.numel(), message.chosen.capacity, message.encoding.dtype
    with stage("encode"):
        seeds = next_seeds(memory, sketch.rows, u.device)
        table = kernels.insert(u, sketch.column_count(size), seeds)
        broken = (1 - message.finite).float().view(1)
        cells = _rounded(torch.cat([table.view(-1), broken]), dtype)
    tables = to_server(cells, group)
    with stage("compress"):
        count = sketch.candidate_count(size, k, group.size)
        asked = torch.zeros(count + 1, dtype=torch.int32, device=u.device)
        if tables is not None:
            total = mean(tables)
            asked[:count] = find_largest(total[:-1].view_as(table), seeds, size, count)
            asked[count] = total[-1] == 0
    asked = from_server(asked, group)
    indices, ok = asked[:count], asked[count] != 0
    sent = _rounded(u[indices], dtype)
    values = to_server(sent, group)
    with stage("decode"):
        answer = torch.zeros(2, min(k, count), dtype=torch.int32, device=u.device)
        if values is not None:
            exact = mean(values)
            best = kernels.topk(exact, min(k, count))
            answer[0], answer[1] = best, exact[best].view(torch.int32)
    best, bits = from_server(answer, group).unbind()
    with stage("decode"):
        update = u.new_empty(size + 1)
        kernels.reset_mean(update, ok)
        kernels.add_entries(update, indices[best], bits.view(torch.float32))
        chosen = torch.full((), best.numel(), dtype=torch.int32, device=u.device)
        contribution = sent.float()[best]
    return Outcome(update, Entries(Sparse(indices[best], contribution, chosen, size)), ok)


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values in the dtype that they travel in, none of them rounded to infinity."""
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


def to_server(values: Tensor, group: Group) -> Tensor | None:
    """Send `values` to rank 0; return there those of all ranks [ranks, n], None elsewhere."""
    rows = [values]
    for rank in range(1, group.size):
        received = group.swap(
            values, 0 if group.rank == rank else None, rank if group.rank == 0 else None
        )
        if received is not None:
            rows.append(received)
    return torch.stack(rows) if group.rank == 0 else None


def from_server(values: Tensor, group: Group) -> Tensor:
    """Return the values of rank 0, which sends them to one rank after the other."""
    for rank in range(1, group.size):
        received = group.swap(
            values, rank if group.rank == 0 else None, 0 if group.rank == rank else None
        )
        if received is not None:
            values = received
    return values


def server_bytes(
    ranks: int, size: int, capacity: int, encoding: Encoding, sketch: SketchSize
) -> int:
    """Return the bytes that leave rank 0, or those that leave a worker if these are more."""
    count = sketch.candidate_count(size, capacity, ranks)
    server = (ranks - 1) * (4 * (count + 1) + 8 * min(capacity, count))
    worker = (sketch.cell_count(size) + 1 + count) * encoding.dtype.itemsize
    return max(server, worker if ranks > 1 else 0)


def server_rounds(ranks: int) -> int:
    """Return the times that rank 0 waits: four messages from or to every worker."""
    return 4 * (ranks - 1)
