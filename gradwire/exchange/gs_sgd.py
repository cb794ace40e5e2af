"""Sketches that pairs of ranks add up: no server, and few rounds."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire.encode import Encoding, Message
from gradwire.exchange.exchange import SUMMED, Exchange, Outcome
from gradwire.exchange.means import doubling_rounds
from gradwire.exchange.sketch_size import SketchSize, sketch_suits, sketch_work
from gradwire.exchange.sketched import mean_by_sketch
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
    rows: int = SketchSize.rows,
    columns: int = SketchSize.columns,
    ratio: float = SketchSize.ratio,
    candidates: int = SketchSize.candidates,
) -> Outcome:
    """Sketches as in sketched, in 4 log2 P rounds instead of 4 (P - 1).

    gs-SGD of Dai et al. (2021), reconstructed from its abstract. The sketch sizes and the way of
    summing are ours. The steps are the same as in `sketched`: a sketch, the mean of the sketches,
    the same `candidates` x k places on every rank, the exact mean there, and its k largest. Here
    both means are taken by halving and doubling.
    """
    sketch = SketchSize(rows, columns, ratio, candidates)
    return mean_by_sketch(message, u, group, memory, sketch, halving_mean)


def halving_mean(values: Tensor, dtype: torch.dtype, group: Group) -> tuple[Tensor, Tensor]:
    """Return (mean, contribution), as `ordered_mean` does, in 2 log2 P rounds.

    Take 2^n ranks. In each of n rounds a rank swaps half of its values with a partner, and adds the
    other half. The rank then owns the sum of one part. In n more rounds the parts come together.
    Each sum is made once, in an order that depends on the ranks only. Ranks beyond 2^n hand their
    values over first and get the mean last. A rank keeps the rounding errors of the values it
    sends.
    """
    rounds, power = doubling_rounds(group.size)
    rank = group.rank
    inside, extra = rank < power, group.size - power
    part = -(-values.numel() // power)
    with stage("encode"):
        total = values.new_zeros(power, part)
        total.view(-1)[: values.numel()] = values
        total = _clamped(total, dtype)
        contribution = total.clone()
    fold_to = None if inside else rank - power
    fold_from = rank + power if rank < extra else None
    if extra:
        _swap_and_add(
            group, total, contribution, slice(0, power), slice(0, power), dtype, fold_to, fold_from
        )
    low, high = 0, power
    for r in reversed(range(rounds)):
        middle = (low + high) // 2
        halves = slice(low, middle), slice(middle, high)
        upper = bool(rank >> r & 1)
        partner = rank ^ 1 << r if inside else None
        _swap_and_add(
            group, total, contribution, halves[not upper], halves[upper], dtype, partner, partner
        )
        low, high = (middle, high) if upper else (low, middle)
    with stage("decode"):
        mean = total / group.size
        sent = _clamped(mean, dtype).to(dtype)
        if inside:
            contribution[rank] -= group.size * (mean[rank] - sent[rank].float())
    for r in range(rounds):
        first, partner_first = rank >> r << r, (rank >> r ^ 1) << r
        partner = rank ^ 1 << r if inside else None
        block = sent[first : first + (1 << r)] if inside else sent[: 1 << r]
        received = group.swap(block.contiguous(), partner, partner)
        if received is not None:
            sent[partner_first : partner_first + (1 << r)] = received
    if extra:
        received = group.swap(sent, fold_from, fold_to)
        sent = sent if received is None else received
    size = values.numel()
    return sent.view(-1)[:size].float(), contribution.view(-1)[:size]


def _swap_and_add(
    group: Group,
    total: Tensor,
    contribution: Tensor,
    sent_rows: slice,
    kept_rows: slice,
    dtype: torch.dtype,
    target: int | None,
    source: int | None,
) -> None:
    """Send the `sent_rows`, and add the received rows to the `kept_rows`.

    The rounding errors of the sent rows are taken off the contribution.
    """
    with stage("encode"):
        sent = _clamped(total[sent_rows], dtype).to(dtype)
        if target is not None and dtype != torch.float32:
            contribution[sent_rows] -= total[sent_rows] - sent.float()
    received = group.swap(sent, target, source)
    if received is not None:
        with stage("decode"):
            total[kept_rows] += received.float()


def _clamped(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values within the range of the dtype, so that none rounds to infinity.

    The clamped excess stays in the residual.
    """
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit)


def _halving_bytes(ranks: int, entries: int, itemsize: int) -> int:
    """Return the most bytes that leave one rank in `halving_mean`.

    If P is not a power of two, that rank takes in the values of another one.
    """
    _, power = doubling_rounds(ranks)
    parts = 2 * (power - 1) + (power if ranks > power else 0)
    return parts * -(-entries // power) * itemsize


def gs_sgd_bytes(ranks: int, size: int, capacity: int, encoding: Encoding, **options: Any) -> int:
    """Return the bytes that leave one rank: 2 (P - 1) / P of cells and candidates.

    If P is not 2^n, the factor is 3 - 2 / 2^n.
    """
    sketch, itemsize = SketchSize(**options), encoding.dtype.itemsize
    parts = sketch.cell_count(size) + 1, sketch.candidate_count(size, capacity, ranks)
    return sum(_halving_bytes(ranks, entries, itemsize) for entries in parts)


def gs_sgd_rounds(ranks: int, **options: Any) -> int:
    """Return the rounds: 2 log2 P for each of two means.

    If P is not a power of two, each mean takes two more.
    """
    rounds, power = doubling_rounds(ranks)
    return 2 * (2 * rounds + (2 if ranks > power else 0))


def gs_sgd_legs(network: "Network", size: int, capacity: int, encoding: Encoding) -> "list[Leg]":
    """Return the legs: halves of the vectors to ever nearer partners, and back.

    The first vector is the cells, the second the candidates.
    """
    sketch, itemsize = SketchSize(), encoding.dtype.itemsize
    legs: list[Leg] = []
    for entries in (
        sketch.cell_count(size) + 1,
        sketch.candidate_count(size, capacity, network.workers),
    ):
        rounds, power = doubling_rounds(network.workers)
        part = -(-entries // power) * itemsize
        halving = [network.pairs(part << r, 1 << r) for r in reversed(range(rounds))]
        legs += halving + halving[::-1]
        if network.workers > power:
            legs += [network.pairs(0, power), network.pairs(power * part, power)]
    return legs


EXCHANGE = Exchange(
    gs_sgd,
    gs_sgd_bytes,
    gs_sgd_rounds,
    SUMMED,
    chooses=True,
    check=SketchSize,
    legs=gs_sgd_legs,
    work=sketch_work,
    suits=sketch_suits,
)
