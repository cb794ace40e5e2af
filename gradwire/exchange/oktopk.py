"""Regions of the vector have owners: entries go to their owner, sums come back."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire.encode import Encoding, Message, encode, nbytes
from gradwire.errors import ConfigError
from gradwire.exchange.exchange import Outcome
from gradwire.exchange.sparse_sum import add_all, keep, restrict, subtract
from gradwire.kernels import spread, start
from gradwire.ranks.group import Group
from gradwire.stages import stage
from gradwire.types import Entries, Memory, Sparse

if TYPE_CHECKING:
    from gradwire.exchange.exchange import Received
    from gradwire.plan.network import Leg, Network

FEW, MANY, STEP = 2 / 3, 5 / 4, 1.012
"""Between refreshes the threshold is divided or multiplied by STEP below FEW k or above MANY k."""


def oktopk(
    message: Message, u: Tensor, group: Group, memory: Memory, *, refresh: int = 32
) -> Outcome:
    """Sums by owners of regions, of which about the k largest count.

    Ok-Topk of Li and Hoefler (2022). 1. each rank sends its entries in region r to rank r, at most
    c = ceil(1.5 k / P); 2. rank r adds them in rank order and keeps the c largest that reach the
    global threshold; 3. all gather what was kept. Sends 2 c (P - 1) entries, 3 k (P - 1) / P, in
    two collectives of equal buffers; what does not fit, smallest first, stays in the residual, and
    so does whatever is not in the result.
    The threshold is exact in every `refresh`-th step, the k-th largest that was gathered, and is
    reused in between with the authors' steps. The regions split evenly what was chosen on average
    over the workers; the places travel with the gather, so that every step moves them. Different
    from the paper: fixed buffers, regions that move at every step, an exact step after one that
    found less than k / 3, and no local threshold, for the method chooses. With fixed buffers
    refresh=1 costs the same bytes and keeps k exactly.
    """
    c = room(group.size, message.chosen.capacity)
    with stage("encode"):
        edges, threshold, exact = _remembered(memory, group.size, refresh, u)
        mine = message.chosen
        parts = split(mine, edges, group.size, c)
        encoding = _with_indices(message.encoding, u.numel(), c)
        usable = message.finite == 1
        rows = [encode(part, usable, encoding) for part in parts]
    received = group.all_to_all(torch.stack([row.buffer for row in rows]))
    with stage("decode"):
        theirs, good = rows[0].unpack_all(received)
        total = keep(add_all(theirs), c)
    with stage("encode"):
        reached = torch.where(total.values.abs() >= threshold, total.indices, u.numel())
        kept = restrict(total, reached.sort().values)
        owned = encode(kept, good, encoding)
        places = quantiles(mine, group.size)
    gathered = group.all_gather(torch.cat([owned.buffer, places.view(torch.uint8)]))
    with stage("decode"):
        length = owned.buffer.numel()
        sums, ok = owned.unpack_all(gathered[:, :length])
        result = join(sums, message.chosen.capacity, exact)
        memory["oktopk.regions"] = gathered[:, length:].contiguous().view(torch.int32)
        memory["oktopk.threshold"] = adapted(result, message.chosen.capacity, threshold, exact)
        update = u.new_empty(u.numel() + 1)
        start(update, ok)
        spread(update, result.indices, result.values / group.size)
        sent = restrict(add_all([row.delivered for row in rows]), result.indices)
        if encoding.values != "fp32":
            lost = restrict(subtract(kept, owned.delivered), result.indices)
            sent = subtract(sent, lost)
    return Outcome(update, Entries(sent), ok)


def room(ranks: int, k: int) -> int:
    """Entries that fit into what one rank sends to, or keeps for, one region."""
    return min(k, -(-3 * k // (2 * ranks)))


def split(mine: Sparse, edges: Tensor, ranks: int, c: int) -> list[Sparse]:
    """The entries by region, [edges[r - 1], edges[r]): the c largest of each, ascending."""
    real = mine.indices < mine.size
    region = torch.searchsorted(edges, mine.indices, right=True)
    region = torch.where(real, region, ranks)
    # Sorted by magnitude, then stably by region: an entry's place says how many in it are larger.
    order = mine.values.abs().sort(descending=True, stable=True).indices
    order = order[region[order].sort(stable=True).indices]
    regions = torch.arange(ranks + 1, dtype=torch.int64, device=edges.device)
    starts = torch.searchsorted(region[order], regions)
    place = torch.empty_like(order)
    everyone = torch.arange(order.numel(), dtype=torch.int64, device=order.device)
    place[order] = everyone - starts[region[order]]
    fits = (place < c) & real
    before = fits.cumsum(0) - 1
    first = torch.zeros(ranks + 1, dtype=torch.int64, device=edges.device)
    counts = first.index_add(0, region, fits.long())
    column = before - (counts.cumsum(0) - counts)[region]
    at = torch.where(fits, region * c + column, ranks * c)
    indices = mine.indices.new_full((ranks * c + 1,), mine.size).scatter_(0, at, mine.indices)
    values = mine.values.new_zeros(ranks * c + 1).scatter_(0, at, mine.values)
    return [
        Sparse(indices[r * c : r * c + c], values[r * c : r * c + c], counts[r].int(), mine.size)
        for r in range(ranks)
    ]


def quantiles(mine: Sparse, ranks: int) -> Tensor:
    """int32 [ranks]: where the regions of this rank alone would end; the last is the size."""
    cuts = torch.arange(1, ranks + 1, dtype=torch.int64, device=mine.indices.device)
    at = (cuts * mine.count) // ranks
    ends = mine.indices[at.clamp(max=mine.capacity - 1)]
    return torch.where(cuts < ranks, ends, mine.size).to(torch.int32)


def join(sums: Sequence[Sparse], k: int, exact: Tensor) -> Sparse:
    """What the owners kept, in one; only the k largest in a step that is exact."""
    total = add_all(sums)
    largest = keep(total, min(k, total.capacity))
    where = torch.full_like(total.indices, total.size)
    where[: largest.capacity] = largest.indices
    return restrict(total, torch.where(exact, where, total.indices))


def adapted(result: Sparse, k: int, threshold: Tensor, exact: Tensor) -> Tensor:
    """The threshold of the next step; 0 where it is not known, which makes that step exact."""
    # As fp32: between a whole number and one that is not, the default dtype would decide.
    n = result.count.float()
    smallest = torch.where(result.indices < result.size, result.values.abs(), float("inf")).amin()
    # Fewer than k entries say nothing of the k-th largest.
    fresh = torch.where(n < k, 0.0, smallest)
    moved = torch.where(n > MANY * k, threshold * STEP, threshold)
    moved = torch.where(n < FEW * k, threshold / STEP, moved)
    # A flush, or a sudden change, leaves a threshold that small steps would follow too slowly.
    moved = torch.where(3 * n < k, 0.0, moved)
    return torch.where(exact, fresh, moved)


def _remembered(
    memory: Memory, ranks: int, refresh: int, u: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Where regions end (all but the last), the threshold, and whether this step is exact."""
    if "oktopk.steps" not in memory:
        memory["oktopk.steps"] = torch.zeros((), dtype=torch.int64, device=u.device)
        memory["oktopk.threshold"] = torch.zeros((), dtype=torch.float32, device=u.device)
    steps = memory["oktopk.steps"]
    exact = (steps % refresh == 0) | (memory["oktopk.threshold"] == 0)
    steps.add_(1)
    places = memory.get("oktopk.regions")
    if places is None or places.shape != (ranks, ranks):
        ends = torch.arange(1, ranks + 1, dtype=torch.int64, device=u.device) * u.numel() // ranks
        places = ends.expand(ranks, ranks)
    edges = (places.long().sum(0) // ranks)[:-1].to(torch.int32)
    threshold = torch.where(exact, 0.0, memory["oktopk.threshold"])
    return edges.contiguous(), threshold, exact


def _with_indices(encoding: Encoding, size: int, c: int) -> Encoding:
    """Regions cut the indices anew: also common ones travel."""
    indices = "auto" if encoding.indices == "common" else encoding.indices
    return replace(encoding, indices=indices).settled(size, c)


def oktopk_check(refresh: int = 32) -> None:
    """Raises for a period that is none."""
    if refresh < 1:
        raise ConfigError(f"refresh must be at least 1, got {refresh}: 1 is exact in every step")


def oktopk_bytes(ranks: int, size: int, capacity: int, encoding: Encoding, **options: Any) -> int:
    """P - 1 messages of c entries to the owners, as many from each, and P places with these."""
    c = room(ranks, capacity)
    encoding = _with_indices(encoding, size, c)
    return (ranks - 1) * (2 * nbytes(c, encoding, size) + 4 * ranks)


def oktopk_rounds(ranks: int, **options: Any) -> int:
    """To every owner, and once around the ring."""
    return 2 * (ranks - 1)


def oktopk_legs(network: "Network", size: int, capacity: int, encoding: Encoding) -> "list[Leg]":
    """Half to the owners; half, and the places, to everyone."""
    ranks = network.workers
    total = oktopk_bytes(ranks, size, capacity, encoding)
    places = 4 * ranks * (ranks - 1)
    sent = (total - places) // 2
    return [network.everyone(sent, ranks - 1), network.ring(sent + places, ranks - 1)]


def oktopk_received(got: "Received") -> float:
    """Choices to their owners, sums back: about 1.5 k each, merged once each.

    What is kept of the own choices is found again.
    """
    return 3 * got.k * (got.read + 18 * got.merge) + got.k * got.add
