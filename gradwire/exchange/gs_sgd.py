"""Sketches again, added by ranks that meet in pairs: no server, and few rounds."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire.encode import Encoding, Message
from gradwire.exchange.exchange import Outcome
from gradwire.exchange.means import doubling
from gradwire.exchange.sketch_size import Table
from gradwire.exchange.sketched import by_sketch
from gradwire.ranks.group import Group
from gradwire.stages import stage
from gradwire.types import Memory

if TYPE_CHECKING:
    from gradwire.plan.network import Leg, Network


def gs_sgd(
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
    """As sketched, in 4 log2 P rounds instead of 4 (P - 1).

    gs-SGD of Dai et al. (2021), reconstructed from its abstract: sketch sizes, and how it sums, are
    ours. Sketch, mean of the sketches, the same `candidates` x k places on every rank, exact mean
    there, k largest of it: see `sketched`. Here both means are taken by halving and doubling.
    """
    sketch = Table(rows, columns, ratio, candidates)
    return by_sketch(message, u, group, memory, sketch, halving_mean)


def halving_mean(values: Tensor, dtype: torch.dtype, group: Group) -> tuple[Tensor, Tensor]:
    """(mean, given), as `ordered_mean`, in 2 log2 P rounds.

    Of 2^n ranks, in each of n rounds a rank swaps half of what it holds with a partner and adds
    the other half; then it owns the sum of one part, and in n more rounds the parts come together.
    Each sum is made once, in an order that depends on the ranks only. Ranks beyond 2^n hand their
    values over first and get the mean last. Whatever a rank rounds when it sends stays with it.
    """
    rounds = group.size.bit_length() - 1
    power, rank = 1 << rounds, group.rank
    inside, extra = rank < power, group.size - power
    part = -(-values.numel() // power)
    with stage("encode"):
        total = values.new_zeros(power, part)
        total.view(-1)[: values.numel()] = values
        total = _clamped(total, dtype)
        given = total.clone()
    fold_to = None if inside else rank - power
    fold_from = rank + power if rank < extra else None
    if extra:
        _add(group, total, given, slice(0, power), slice(0, power), dtype, fold_to, fold_from)
    low, high = 0, power
    for r in reversed(range(rounds)):
        middle = (low + high) // 2
        halves = slice(low, middle), slice(middle, high)
        upper = bool(rank >> r & 1)
        partner = rank ^ 1 << r if inside else None
        _add(group, total, given, halves[not upper], halves[upper], dtype, partner, partner)
        low, high = (middle, high) if upper else (low, middle)
    with stage("decode"):
        mean = total / group.size
        sent = _clamped(mean, dtype).to(dtype)
        if inside:
            given[rank] -= group.size * (mean[rank] - sent[rank].float())
    for r in range(rounds):
        mine, theirs = rank >> r << r, (rank >> r ^ 1) << r
        partner = rank ^ 1 << r if inside else None
        block = sent[mine : mine + (1 << r)] if inside else sent[: 1 << r]
        received = group.swap(block.contiguous(), partner, partner)
        if received is not None:
            sent[theirs : theirs + (1 << r)] = received
    if extra:
        received = group.swap(sent, fold_from, fold_to)
        sent = sent if received is None else received
    size = values.numel()
    return sent.view(-1)[:size].float(), given.view(-1)[:size]


def _add(
    group: Group,
    total: Tensor,
    given: Tensor,
    away: slice,
    stays: slice,
    dtype: torch.dtype,
    to: int | None,
    source: int | None,
) -> None:
    """Send the rows `away`, less what rounding takes; add what comes to the rows that stay."""
    with stage("encode"):
        sent = _clamped(total[away], dtype).to(dtype)
        if to is not None and dtype != torch.float32:
            given[away] -= total[away] - sent.float()
    received = group.swap(sent, to, source)
    if received is not None:
        with stage("decode"):
            total[stays] += received.float()


def _clamped(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Above its largest number a dtype rounds to infinity; clamped, the rest stays behind."""
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit)


def halving_bytes(ranks: int, entries: int, itemsize: int) -> int:
    """The most that leaves one rank in `halving_mean`: one that takes in another, if any does."""
    power = 1 << (ranks.bit_length() - 1)
    parts = 2 * (power - 1) + (power if ranks > power else 0)
    return parts * -(-entries // power) * itemsize


def gs_sgd_bytes(ranks: int, size: int, capacity: int, encoding: Encoding, **options: Any) -> int:
    """2 (P - 1) / P of cells and candidates; 3 - 2 / 2^n of them where P is not 2^n."""
    sketch, itemsize = Table(**options), encoding.dtype.itemsize
    parts = sketch.cells(size) + 1, sketch.many(size, capacity)
    return sum(halving_bytes(ranks, entries, itemsize) for entries in parts)


def gs_sgd_rounds(ranks: int, **options: Any) -> int:
    """2 log2 P for each of two means; two more each when P is not a power of two."""
    rounds = ranks.bit_length() - 1
    return 2 * (2 * rounds + (2 if ranks > 1 << rounds else 0))


def gs_sgd_legs(network: "Network", size: int, capacity: int, encoding: Encoding) -> "list[Leg]":
    """Halves of cells, then of candidates, to partners ever nearer, and back."""
    table, itemsize = Table(), encoding.dtype.itemsize
    out: list[Leg] = []
    for entries in (table.cells(size) + 1, table.many(size, capacity)):
        rounds, power = doubling(network.workers)
        part = -(-entries // power) * itemsize
        halving = [network.pairs(part << r, 1 << r) for r in reversed(range(rounds))]
        out += halving + halving[::-1]
        if network.workers > power:
            out += [network.pairs(0, power), network.pairs(power * part, power)]
    return out
