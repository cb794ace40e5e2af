"""Mean of a vector over all ranks, added in rank order; nothing is lost to rounding."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire.kernels import mean
from gradwire.ranks.group import Group
from gradwire.stages import stage

if TYPE_CHECKING:
    from gradwire.plan.network import Leg, Network


def ordered_mean(values: Tensor, dtype: torch.dtype, group: Group) -> tuple[Tensor, Tensor]:
    """Return (mean, contribution): the same fp32 mean on every rank, and this rank's contribution.

    1. Each rank sends part p of its values to rank p, as `dtype`.
    2. Rank p adds the P parts in rank order, in fp32, and divides.
    3. All ranks gather the parts of the mean, as `dtype`.

    A rank sends 2 (P - 1) / P of the values, as a ring all-reduce does. The sum does not depend on
    the backend. The contribution leaves out the first rounding error. The second is charged to the
    owner of the part, times P: mean of (values - contribution) = mean of values - mean.
    """
    part = -(-values.numel() // group.size)
    with stage("encode"):
        rows = values.new_zeros(group.size, part)
        rows.view(-1)[: values.numel()] = values
        sent = rows
        if dtype != rows.dtype:
            # Above its largest number bf16 rounds to infinity; clamped, the rest stays here.
            limit = torch.finfo(dtype).max
            sent = rows.clamp_(-limit, limit).to(dtype)
    received = group.all_to_all(sent)
    with stage("decode"):
        exact = mean(received)
        rounded, contribution = exact.to(dtype), sent.float()
        if rounded is not exact:
            contribution[group.rank] -= group.size * (exact - rounded.float())
    gathered = group.all_gather(rounded)
    return gathered.view(-1)[: values.numel()].float(), contribution.view(-1)[: values.numel()]


def ordered_bytes(ranks: int, entries: int, itemsize: int) -> int:
    """Return the bytes that leave one rank in `ordered_mean`."""
    return 2 * (ranks - 1) * -(-entries // ranks) * itemsize


def ordered_rounds(ranks: int) -> int:
    """Return the rounds of `ordered_mean`.

    A rank waits for every other rank's part, then for every other part of the mean.
    """
    return 2 * (ranks - 1)


def ordered_legs(network: "Network", entries: int, itemsize: int) -> "list[Leg]":
    """Return the legs: each part to the part's owner, and the parts of the mean to all ranks."""
    others = network.workers - 1
    sent = others * -(-entries // network.workers) * itemsize
    return [network.everyone(sent, others), network.ring(sent, others)]


def doubling_rounds(ranks: int) -> tuple[int, int]:
    """Return n and 2^n, the largest power of two that is not above the ranks."""
    rounds = ranks.bit_length() - 1
    return rounds, 1 << rounds
