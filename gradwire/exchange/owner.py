"""Owner: every part of the vector has an owner, who sends its mean back in a few bits."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire.accumulate.owned import OWNED, in_order, part_length
from gradwire.encode import Encoding, Message, encode, nbytes
from gradwire.encode.format import VALUES
from gradwire.errors import ConfigError, unknown
from gradwire.exchange.allgather import mean_of_gathered
from gradwire.exchange.exchange import Exchange, Outcome
from gradwire.exchange.owned_parts import cut_into_parts, part_capacity
from gradwire.ranks.group import Group
from gradwire.stages import stage
from gradwire.types import Entries, Memory, Sparse

if TYPE_CHECKING:
    from gradwire.exchange.exchange import LocalTask, Received
    from gradwire.plan.network import Leg, Network
    from gradwire.plan.work import Work

_BACK, _ROOM = "int4", 1.125


def owner(
    message: Message,
    u: Tensor,
    group: Group,
    memory: Memory,
    *,
    back: str = _BACK,
    room: float = _ROOM,
) -> Outcome:
    """Entries go to the owner of their part, and its mean comes back: the same bytes at every P.

    1. Each rank sends its entries in part p to rank p, encoded as the config says.
    2. Rank p takes the mean of its part in rank order, and adds the rounding that it kept.
    3. Rank p encodes every entry of the part as `back`, and keeps the new rounding.
    4. All ranks gather the parts, so that every rank reads the same bytes.

    Blocks of 256 entries are dealt out to the parts in turn, so every part has its share of every
    layer. What rank p keeps is d / P entries beside its residual. In the law it counts P times: the
    sum of all u is P times the update, plus all residuals, plus P times the growth of what owners
    keep. Before a step without owners, such as a flush, it moves into the residual.

    The message for a part has room for `room` times an even share of the entries. Of more entries a
    run is sent that begins elsewhere in each step; the others stay in the residual.
    """
    size, ranks, chosen = u.numel(), group.size, message.chosen
    length = part_length(size, ranks)
    with stage("encode"):
        capacity = part_capacity(chosen.capacity, size, length, room)
        parts = cut_into_parts(chosen, ranks, length, capacity, _next_step(memory, u))
        usable = message.finite == 1
        rows = [encode(part, usable, message.encoding) for part in parts.each]
    received = group.all_to_all(torch.stack([row.buffer for row in rows]))
    with stage("decode"):
        mean, arrived = mean_of_gathered(rows[group.rank], received)
        assert mean is not None, "no target was given"
    with stage("encode"):
        kept = memory.get(OWNED)
        answer = _encode_all(mean[:-1] if kept is None else mean[:-1] + kept, arrived, back)
    gathered = group.all_gather(answer.buffer)
    with stage("decode"):
        means, ok = answer.unpack_all(gathered)
        values = u.new_zeros(size + 1)
        values[:size] = in_order(torch.stack([part.values for part in means]), size)
        update = torch.where(ok, values, float("nan"))
        rounding = answer.chosen.values - answer.delivered.values
        sent = parts.joined([row.delivered.values for row in rows])
    return Outcome(update, Entries(sent), ok, owned_rounding=rounding)


def _next_step(memory: Memory, u: Tensor) -> Tensor:
    """Return the number of this step (0-d, on the device)."""
    if "owner.steps" not in memory:
        memory["owner.steps"] = torch.zeros((), dtype=torch.int64, device=u.device)
    return memory["owner.steps"].add_(1)


def _encode_all(values: Tensor, usable: Tensor, back: str) -> Message:
    """Return the message of a whole part; no index travels."""
    length = values.numel()
    indices = torch.arange(length, dtype=torch.int32, device=values.device)
    count = torch.full((), length, dtype=torch.int32, device=values.device)
    # Not finite where a rank was not; the message says so, and its values count for nothing.
    entries = Sparse(indices, values, count, length, common=True)
    return encode(entries, usable, Encoding(back, "common"))


def owner_check(back: str = _BACK, room: float = _ROOM) -> None:
    """Raise ConfigError for a code that does not exist, or for room below an even share."""
    if back not in VALUES:
        raise unknown("value encoding", back, VALUES)
    if not room >= 1:
        raise ConfigError(f"room must be at least 1, an even share for each owner, got {room!r}")


def _halves(
    ranks: int, size: int, capacity: int, encoding: Encoding, back: str, room: float
) -> tuple[int, int]:
    """Return the bytes of the message to one owner, and of the message of one owner."""
    length = part_length(size, ranks)
    settled = encoding.settled(size, capacity)
    return (
        nbytes(part_capacity(capacity, size, length, room), settled, length),
        nbytes(length, Encoding(back, "common"), length),
    )


def owner_bytes(
    ranks: int,
    size: int,
    capacity: int,
    encoding: Encoding,
    back: str = _BACK,
    room: float = _ROOM,
) -> int:
    """Return the bytes that leave one rank: P - 1 messages to owners, and as many as an owner."""
    return (ranks - 1) * sum(_halves(ranks, size, capacity, encoding, back, room))


def owner_rounds(ranks: int, back: str = _BACK, room: float = _ROOM) -> int:
    """Return the rounds: to every owner, and once around the ring."""
    return 2 * (ranks - 1)


def owner_legs(network: "Network", size: int, capacity: int, encoding: Encoding) -> "list[Leg]":
    """Return the legs: entries from each rank to each owner, and the parts of the mean to all."""
    others = network.workers - 1
    sent, answer = _halves(network.workers, size, capacity, encoding, _BACK, _ROOM)
    return [network.everyone(others * sent, others), network.ring(others * answer, others)]


def owner_received(received: "Received") -> float:
    """Return the nanoseconds: an owner reads and adds the entries of its part, k in all."""
    return received.k * (received.read + received.add)


def owner_work(usual: "Work", task: "LocalTask") -> "Work":
    """Return the work, with a part of the mean to encode, and all of it to decode."""
    return replace(
        usual, encode=usual.encode + task.floor / task.ranks, decode=usual.decode + task.floor
    )


EXCHANGE = Exchange(
    owner,
    owner_bytes,
    owner_rounds,
    check=owner_check,
    owns_parts=True,
    legs=owner_legs,
    received=owner_received,
    work=owner_work,
    # The way back takes 4 bits for every entry, however few were chosen.
    suits=lambda density, indices: density >= 0.05,
)
