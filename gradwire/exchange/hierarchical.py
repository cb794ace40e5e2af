"""Hierarchical exchange: dense inside a node, sparse between nodes, as clusters are built."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.encode import Encoding, Message, encode, nbytes
from gradwire.errors import ConfigError
from gradwire.exchange.allgather import mean_of_gathered
from gradwire.exchange.exchange import Exchange, Outcome
from gradwire.ranks.group import Group
from gradwire.stages import stage
from gradwire.types import Entries, Memory, Sparse

if TYPE_CHECKING:
    from gradwire.exchange.exchange import LocalTask, Received
    from gradwire.plan.network import Leg, Network
    from gradwire.plan.work import Work


def hierarchical(
    message: Message, u: Tensor, group: Group, memory: Memory, *, local: int = 0
) -> Outcome:
    """Dense sums inside a node, the largest k of each node between nodes.

    HiTopKComm of Shi et al. (2021), for m nodes of n = `local` ranks:
    1. Inside the node, rank s adds every rank's part s of u, in rank order.
    2. Rank s chooses the k / n largest entries of that part.
    3. The ranks s of all nodes gather these entries.
    4. Inside the node, all ranks gather the gathered entries, and add them up.

    A rank delivers all of its u at the entries that its node chose, so the law holds. The rounding
    errors of a node's sum stay with the rank that chose. Between nodes a rank sends m - 1 messages
    of k / n entries. Inside it sends 4 d (n - 1) / n bytes and m (n - 1) messages. `local` 0 means
    LOCAL_WORLD_SIZE, which torchrun sets, or all ranks.
    """
    size, k = u.numel(), message.chosen.capacity
    n = _node_size(group.size, local)
    inside, between = group.split(n)
    with stage("encode"):
        part = -(-size // n)
        rows = u.new_zeros(n, part)
        rows.view(-1)[:size] = u
    received = inside.all_to_all(rows)
    with stage("compress"):
        chosen = _largest(received, -(-k // n), inside.rank * part, size)
    with stage("encode"):
        node_message = encode(chosen, message.finite == 1, message.encoding)
    across = between.all_gather(node_message.buffer)
    everything = inside.all_gather(across.view(-1)).view(group.size, -1)
    with stage("decode"):
        update, ok = mean_of_gathered(node_message, everything)
        # Row s m + j is node j's choice from part s.
        node_lists = everything.view(n, between.size, -1)[:, between.rank]
        indices, _ = node_message.unpack_indices(node_lists[:, : node_message.index_part.numel()])
        real = indices < size
        contribution = torch.where(real, u[indices.clamp(max=size - 1)], 0)
        rounding_error = chosen.values - node_message.delivered.values
        contribution.view(n, -1)[inside.rank] -= rounding_error
    return Outcome(
        update, Entries(Sparse(indices, contribution, real.sum(dtype=torch.int32), size)), ok
    )


def _largest(parts: Tensor, k: int, first: int, size: int) -> Sparse:
    """Return the k largest entries of the sum of the rows, a part that begins at entry `first`."""
    total = parts[0]
    for row in parts[1:]:
        total = total + row
    places, values = kernels.select(total.contiguous(), k)
    inside = places < size - first
    indices = torch.where(inside, places + first, size).to(torch.int32)
    return Sparse(indices, torch.where(inside, values, 0), inside.sum(dtype=torch.int32), size)


def _node_size(ranks: int, local: int) -> int:
    """Return the ranks of one node; raise ConfigError if nodes would differ in size."""
    n = local or int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if n < 1 or ranks % n:
        fits = [str(i) for i in range(1, ranks + 1) if ranks % i == 0]
        raise ConfigError(
            f"hierarchical needs nodes of one size: {ranks} ranks cannot be cut into nodes of {n}; "
            f"give local={' or '.join(fits)}"
        )
    return n


def hierarchical_prepare(group: Group, size: int, capacity: int, local: int = 0) -> None:
    """Make the groups inside and between nodes; raise ConfigError if nodes would differ in size."""
    group.split(_node_size(group.size, local))


def hierarchical_bytes(
    ranks: int, size: int, capacity: int, encoding: Encoding, **options: Any
) -> int:
    """Return the bytes that leave one rank.

    Parts of u and m messages go to n - 1 ranks inside, and a message to m - 1 nodes.
    """
    n = _node_size(ranks, options.get("local", 0))
    message_bytes, nodes = nbytes(-(-capacity // n), encoding, size), ranks // n
    return (n - 1) * (4 * -(-size // n) + nodes * message_bytes) + (nodes - 1) * message_bytes


def hierarchical_rounds(ranks: int, **options: Any) -> int:
    """Return the rounds: twice inside, once between."""
    n = _node_size(ranks, options.get("local", 0))
    return 2 * (n - 1) + ranks // n - 1


def hierarchical_legs(
    network: "Network", size: int, capacity: int, encoding: Encoding
) -> "list[Leg]":
    """Return the legs: parts of u inside the node, then messages between and inside nodes."""
    n, nodes = network.local, network.nodes
    message_bytes = nbytes(-(-capacity // n), encoding, size)
    return [
        network.inside((n - 1) * 4 * -(-size // n), n - 1),
        network.across((nodes - 1) * message_bytes, nodes - 1),
        network.inside((n - 1) * nodes * message_bytes, n - 1),
    ]


def hierarchical_received(received: "Received") -> float:
    """Return the nanoseconds: one message per node is read and added."""
    return received.nodes * received.k * (received.read + received.add)


def hierarchical_work(usual: "Work", task: "LocalTask") -> "Work":
    """Return the work: a rank adds up the node, and then selects in one part only."""
    compress = 2 * task.floor + task.select(task.k / task.size, task.size / task.local)
    return replace(usual, compress=compress + task.bundle, encode=usual.encode / task.local)


EXCHANGE = Exchange(
    hierarchical,
    hierarchical_bytes,
    hierarchical_rounds,
    chooses=True,
    prepare=hierarchical_prepare,
    legs=hierarchical_legs,
    received=hierarchical_received,
    work=hierarchical_work,
    preference=3,
)
