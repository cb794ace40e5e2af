"""Ok-Topk: regions of the vector have owners; entries go to their owner, and sums come back."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire.encode import Encoding, Message, encode, nbytes
from gradwire.errors import ConfigError
from gradwire.exchange.exchange import Exchange, Outcome
from gradwire.exchange.sparse_sum import keep_largest, restrict_to, subtract_sparse, sum_sparse
from gradwire.kernels import add_entries, reset_mean
from gradwire.ranks.group import Group
from gradwire.stages import stage
from gradwire.types import Entries, Memory, Sparse

if TYPE_CHECKING:
    from gradwire.exchange.exchange import Received
    from gradwire.plan.network import Leg, Network

_FEW, _MANY, _STEP = 2 / 3, 5 / 4, 1.012
"""The threshold is divided by _STEP below _FEW k, and multiplied by _STEP above _MANY k."""


def oktopk(
    message: Message, u: Tensor, group: Group, memory: Memory, *, refresh: int = 32
) -> Outcome:
    """Sums by the owners of regions; about the k largest sums count.

    Ok-Topk of Li and Hoefler (2022):
    1. Each rank sends its entries in region r to rank r, at most c = ceil(1.5 k / P).
    2. Rank r adds the entries in rank order, and keeps the c largest sums that reach the global
       threshold.
    3. All ranks gather the kept sums.

    A rank sends 2 c (P - 1) entries, 3 k (P - 1) / P, in two collectives of equal buffers. If
    entries do not fit, the smallest stay in the residual. Entries that are not in the result stay
    there too.

    The threshold is exact in every `refresh`-th step: the k-th largest sum that was gathered. In
    between it is reused, with the authors' steps. The regions divide evenly the entries that the
    workers chose on average. The ends of the regions travel with the gather, so that every step
    moves them.
    Different from the paper: buffers are fixed, regions move at every step, and a step is exact
    after one that found less than k / 3. There is no local threshold, because the method chooses.
    With fixed buffers refresh=1 costs the same bytes and keeps k exactly.
    """
    c = region_capacity(group.size, message.chosen.capacity)
    with stage("encode"):
        edges, threshold, exact = _remembered(memory, group.size, refresh, u)
        chosen = message.chosen
        parts = split_by_region(chosen, edges, group.size, c)
        encoding = _with_indices(message.encoding, u.numel(), c)
        usable = message.finite == 1
        rows = [encode(part, usable, encoding) for part in parts]
    received = group.all_to_all(torch.stack([row.buffer for row in rows]))
    with stage("decode"):
        arrived, all_usable = rows[0].unpack_all(received)
        total = keep_largest(sum_sparse(arrived), c)
    with stage("encode"):
        reached = torch.where(total.values.abs() >= threshold, total.indices, u.numel())
        kept = restrict_to(total, reached.sort().values)
        owned = encode(kept, all_usable, encoding)
        ends = region_ends(chosen, group.size)
    gathered = group.all_gather(torch.cat([owned.buffer, ends.view(torch.uint8)]))
    with stage("decode"):
        length = owned.buffer.numel()
        sums, ok = owned.unpack_all(gathered[:, :length])
        result = _join_regions(sums, message.chosen.capacity, exact)
        memory["oktopk.regions"] = gathered[:, length:].contiguous().view(torch.int32)
        memory["oktopk.threshold"] = next_threshold(
            result, message.chosen.capacity, threshold, exact
        )
        update = u.new_empty(u.numel() + 1)
        reset_mean(update, ok)
        add_entries(update, result.indices, result.values / group.size)
        sent = restrict_to(sum_sparse([row.delivered for row in rows]), result.indices)
        if encoding.values != "fp32":
            # The owner of a region keeps the rounding errors of the sums that it sent.
            lost = restrict_to(subtract_sparse(kept, owned.delivered), result.indices)
            sent = subtract_sparse(sent, lost)
    return Outcome(update, Entries(sent), ok)


def region_capacity(ranks: int, k: int) -> int:
    """Return the entries that one rank sends to one region, or keeps for one, at most."""
    return min(k, -(-3 * k // (2 * ranks)))


def split_by_region(sparse: Sparse, edges: Tensor, ranks: int, c: int) -> list[Sparse]:
    """Return the entries by region, [edges[r - 1], edges[r]): the c largest of each, ascending."""
    real = sparse.indices < sparse.size
    region = torch.searchsorted(edges, sparse.indices, right=True)
    region = torch.where(real, region, ranks)
    # Sorted by magnitude, then stably by region: an entry's place is the number of larger entries
    # in its region.
    order = sparse.values.abs().sort(descending=True, stable=True).indices
    order = order[region[order].sort(stable=True).indices]
    regions = torch.arange(ranks + 1, dtype=torch.int64, device=edges.device)
    starts = torch.searchsorted(region[order], regions)
    place = torch.empty_like(order)
    positions = torch.arange(order.numel(), dtype=torch.int64, device=order.device)
    place[order] = positions - starts[region[order]]
    fits = (place < c) & real
    before = fits.cumsum(0) - 1
    first = torch.zeros(ranks + 1, dtype=torch.int64, device=edges.device)
    counts = first.index_add(0, region, fits.long())
    column = before - (counts.cumsum(0) - counts)[region]
    slot = torch.where(fits, region * c + column, ranks * c)
    indices = sparse.indices.new_full((ranks * c + 1,), sparse.size).scatter_(
        0, slot, sparse.indices
    )
    values = sparse.values.new_zeros(ranks * c + 1).scatter_(0, slot, sparse.values)
    return [
        Sparse(indices[r * c : r * c + c], values[r * c : r * c + c], counts[r].int(), sparse.size)
        for r in range(ranks)
    ]


def region_ends(sparse: Sparse, ranks: int) -> Tensor:
    """Return the ends of regions that suit this rank alone, int32 [ranks]; the last is the size."""
    cuts = torch.arange(1, ranks + 1, dtype=torch.int64, device=sparse.indices.device)
    places = (cuts * sparse.count) // ranks
    ends = sparse.indices[places.clamp(max=sparse.capacity - 1)]
    return torch.where(cuts < ranks, ends, sparse.size).to(torch.int32)


def _join_regions(sums: Sequence[Sparse], k: int, exact: Tensor) -> Sparse:
    """Return the sums that all owners kept; only the k largest in an `exact` step."""
    total = sum_sparse(sums)
    largest = keep_largest(total, min(k, total.capacity))
    indices = torch.full_like(total.indices, total.size)
    indices[: largest.capacity] = largest.indices
    return restrict_to(total, torch.where(exact, indices, total.indices))


def next_threshold(result: Sparse, k: int, threshold: Tensor, exact: Tensor) -> Tensor:
    """Return the threshold of the next step; 0 if it is unknown, which makes that step exact."""
    # fp32, because the user's default dtype would decide on an int32 times a float.
    n = result.count.float()
    smallest = torch.where(result.indices < result.size, result.values.abs(), float("inf")).amin()
    # With fewer than k entries the k-th largest is unknown.
    fresh = torch.where(n < k, 0.0, smallest)
    moved = torch.where(n > _MANY * k, threshold * _STEP, threshold)
    moved = torch.where(n < _FEW * k, threshold / _STEP, moved)
    # After a flush or a sudden change, small steps would bring the threshold back too slowly.
    moved = torch.where(3 * n < k, 0.0, moved)
    return torch.where(exact, fresh, moved)


def _remembered(
    memory: Memory, ranks: int, refresh: int, u: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ends of regions (all but the last), the threshold, and True (0-d) if exact."""
    if not {"oktopk.steps", "oktopk.threshold"} <= memory.keys():
        memory["oktopk.steps"] = torch.zeros((), dtype=torch.int64, device=u.device)
        memory["oktopk.threshold"] = torch.zeros((), dtype=torch.float32, device=u.device)
    steps = memory["oktopk.steps"]
    exact = (steps % refresh == 0) | (memory["oktopk.threshold"] == 0)
    steps.add_(1)
    ends = memory.get("oktopk.regions")
    if ends is None or ends.shape != (ranks, ranks):
        even = torch.arange(1, ranks + 1, dtype=torch.int64, device=u.device) * u.numel() // ranks
        ends = even.expand(ranks, ranks)
    edges = (ends.long().sum(0) // ranks)[:-1].to(torch.int32)
    threshold = torch.where(exact, 0.0, memory["oktopk.threshold"])
    return edges.contiguous(), threshold, exact


def _with_indices(encoding: Encoding, size: int, c: int) -> Encoding:
    """Return an encoding for the entries of one region; common indices must travel there too."""
    indices = "auto" if encoding.indices == "common" else encoding.indices
    return replace(encoding, indices=indices).settled(size, c)


def oktopk_check(refresh: int = 32) -> None:
    """Raise ConfigError for a period below 1."""
    if refresh < 1:
        raise ConfigError(f"refresh must be at least 1, got {refresh}: 1 is exact in every step")


def oktopk_bytes(ranks: int, size: int, capacity: int, encoding: Encoding, **options: Any) -> int:
    """Return the bytes that leave one rank: P - 1 messages of c entries to the owners.

    As an owner a rank sends as many messages again, each with P region ends.
    """
    c = region_capacity(ranks, capacity)
    encoding = _with_indices(encoding, size, c)
    return (ranks - 1) * (2 * nbytes(c, encoding, size) + 4 * ranks)


def oktopk_rounds(ranks: int, **options: Any) -> int:
    """Return the rounds: to every owner, and once around the ring."""
    return 2 * (ranks - 1)


def oktopk_legs(network: "Network", size: int, capacity: int, encoding: Encoding) -> "list[Leg]":
    """Return the legs: half to the owners; half, and the region ends, to all ranks."""
    ranks = network.workers
    total = oktopk_bytes(ranks, size, capacity, encoding)
    places = 4 * ranks * (ranks - 1)
    sent = (total - places) // 2
    return [network.everyone(sent, ranks - 1), network.ring(sent + places, ranks - 1)]


def oktopk_received(received: "Received") -> float:
    """Return the nanoseconds: choices go to their owners and sums come back, about 1.5 k each.

    Each entry is merged once. The rank's own choices are then found again among the kept sums.
    """
    return 3 * received.k * (received.read + 18 * received.merge) + received.k * received.add


EXCHANGE = Exchange(
    oktopk,
    oktopk_bytes,
    oktopk_rounds,
    check=oktopk_check,
    legs=oktopk_legs,
    received=oktopk_received,
    preference=2,
)
