"""The mean of a vector over all ranks, added in rank order, and nothing lost to rounding."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire.kernels import mean
from gradwire.ranks.group import Group
from gradwire.stages import stage

if TYPE_CHECKING:
    from gradwire.plan.network import Leg, Network


def ordered_mean(values: Tensor, dtype: torch.dtype, group: Group) -> tuple[Tensor, Tensor]:
    """(mean, given): the same fp32 mean on every rank, and what this rank gave to it.

    1. each rank sends part p of its values to rank p, as `dtype`; 2. rank p adds the P parts in
    rank order, in fp32, and divides; 3. all ranks gather the parts of the mean, as `dtype`.
    Sends 2 (P - 1) / P of the values, as a ring all-reduce does, but the sum does not depend on the
    backend. What the first rounding takes away is not in `given`; what the second does, the owner
    of the part has given P times less: mean of (values - given) = mean of values - mean.
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
        rounded, given = exact.to(dtype), sent.float()
        if rounded is not exact:
            given[group.rank] -= group.size * (exact - rounded.float())
    gathered = group.all_gather(rounded)
    return gathered.view(-1)[: values.numel()].float(), given.view(-1)[: values.numel()]


def ordered_bytes(ranks: int, entries: int, itemsize: int) -> int:
    """What `ordered_mean` of so many values sends."""
    return 2 * (ranks - 1) * -(-entries // ranks) * itemsize


def ordered_rounds(ranks: int) -> int:
    """What `ordered_mean` waits for: every other rank's part, then every other part of the mean."""
    return 2 * (ranks - 1)


def ordered_legs(network: "Network", entries: int, itemsize: int) -> "list[Leg]":
    """A part to its owner, the parts of the mean to everyone."""
    others = network.workers - 1
    sent = others * -(-entries // network.workers) * itemsize
    return [network.everyone(sent, others), network.ring(sent, others)]


def doubling(ranks: int) -> tuple[int, int]:
    """n and 2^n, the largest power of two that is not above the ranks."""
    rounds = ranks.bit_length() - 1
    return rounds, 1 << rounds
