"""Dense inside a node, sparse between nodes: the layout that clusters have."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.encode import Encoding, Message, encode, nbytes
from gradwire.errors import ConfigError
from gradwire.exchange.allgather import mean_of
from gradwire.exchange.exchange import Outcome
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

    HiTopKComm of Shi et al. (2021), for m nodes of n = `local` ranks. 1. inside, rank s adds
    everyone's part s of u, in rank order; 2. it chooses the k / n largest of that part; 3. the
    ranks s of all nodes gather these; 4. inside, all gather what was gathered, and add it up. A
    rank delivers all of its u where its node chose, so the law holds; what rounding takes from a
    node's sum stays with the rank that chose. Between nodes a rank sends m - 1 messages of k / n
    entries, inside 4 d (n - 1) / n bytes and m (n - 1) messages. `local` 0 is LOCAL_WORLD_SIZE, as
    torchrun sets it, or all ranks.
    """
    size, k = u.numel(), message.chosen.capacity
    n = node_size(group.size, local)
    inside, between = group.split(n)
    with stage("encode"):
        part = -(-size // n)
        rows = u.new_zeros(n, part)
        rows.view(-1)[:size] = u
    received = inside.all_to_all(rows)
    with stage("compress"):
        chosen = _largest(received, -(-k // n), inside.rank * part, size)
    with stage("encode"):
        own = encode(chosen, message.finite == 1, message.encoding)
    across = between.all_gather(own.buffer)
    everything = inside.all_gather(across.view(-1)).view(group.size, -1)
    with stage("decode"):
        update, ok = mean_of(own, everything)
        # Row s m + j is what node j chose of part s.
        ours = everything.view(n, between.size, -1)[:, between.rank]
        where, _ = own.unpack_indices(ours[:, : own.index_part.numel()])
        real = where < size
        given = torch.where(real, u[where.clamp(max=size - 1)], 0)
        rounded = chosen.values - own.delivered.values
        given.view(n, -1)[inside.rank] -= rounded
    return Outcome(update, Entries(Sparse(where, given, real.sum(dtype=torch.int32), size)), ok)


def _largest(parts: Tensor, k: int, first: int, size: int) -> Sparse:
    """The k largest of the sum of the rows, which begin at entry `first` of a longer vector."""
    total = parts[0]
    for row in parts[1:]:
        total = total + row
    places, values = kernels.select(total.contiguous(), k)
    inside = places < size - first
    indices = torch.where(inside, places + first, size).to(torch.int32)
    return Sparse(indices, torch.where(inside, values, 0), inside.sum(dtype=torch.int32), size)


def node_size(ranks: int, local: int) -> int:
    """The ranks of one node."""
    n = local or int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if n < 1 or ranks % n:
        fits = [str(i) for i in range(1, ranks + 1) if ranks % i == 0]
        raise ConfigError(
            f"hierarchical needs nodes of one size: {ranks} ranks cannot be cut into nodes of {n}; "
            f"give local={' or '.join(fits)}"
        )
    return n


def hierarchical_prepare(group: Group, size: int, capacity: int, local: int = 0) -> None:
    """Makes the groups inside and between nodes; raises where nodes would differ in size."""
    group.split(node_size(group.size, local))


def hierarchical_bytes(
    ranks: int, size: int, capacity: int, encoding: Encoding, **options: Any
) -> int:
    """Parts of u and m messages to n - 1 ranks inside, and a message to m - 1 nodes."""
    n = node_size(ranks, options.get("local", 0))
    one, nodes = nbytes(-(-capacity // n), encoding, size), ranks // n
    return (n - 1) * (4 * -(-size // n) + nodes * one) + (nodes - 1) * one


def hierarchical_rounds(ranks: int, **options: Any) -> int:
    """Twice inside, once between."""
    n = node_size(ranks, options.get("local", 0))
    return 2 * (n - 1) + ranks // n - 1


def hierarchical_legs(
    network: "Network", size: int, capacity: int, encoding: Encoding
) -> "list[Leg]":
    """Parts of u inside the node, messages between nodes, and these inside again."""
    n, nodes = network.local, network.nodes
    one = nbytes(-(-capacity // n), encoding, size)
    return [
        network.inside((n - 1) * 4 * -(-size // n), n - 1),
        network.across((nodes - 1) * one, nodes - 1),
        network.inside((n - 1) * nodes * one, n - 1),
    ]


def hierarchical_received(got: "Received") -> float:
    """One message a node."""
    return got.nodes * got.k * (got.read + got.add)


def hierarchical_work(usual: "Work", task: "LocalTask") -> "Work":
    """It adds up the node before it selects in its own part."""
    compress = 2 * task.floor + task.select(task.k / task.size, task.size / task.local)
    return replace(usual, compress=compress + task.bundle, encode=usual.encode / task.local)
