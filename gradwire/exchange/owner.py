"""Owner: every part of the vector has an owner, who sends its mean back in a few bits."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire.encode import Encoding, Message, encode, nbytes
from gradwire.encode.format import BLOCK, VALUES
from gradwire.errors import ConfigError, unknown
from gradwire.exchange.allgather import mean_of_gathered
from gradwire.exchange.exchange import Exchange, Outcome
from gradwire.ranks.group import Group
from gradwire.stages import stage
from gradwire.types import Entries, Memory, Sparse

if TYPE_CHECKING:
    from gradwire.exchange.exchange import LocalTask, Received
    from gradwire.plan.network import Leg, Network
    from gradwire.plan.work import Work

log = logging.getLogger("gradwire")

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
    layer. What rank p keeps is d / P entries of its memory, and never in a residual. In the law it
    counts P times: the sum of all u is P times the update, plus all residuals, plus P times the
    growth of what owners keep.

    The message for a part has room for `room` times an even share of the entries. Of more entries a
    run is sent that begins elsewhere in each step; the others stay in the residual.
    """
    size, ranks, chosen = u.numel(), group.size, message.chosen
    length = part_length(size, ranks)
    with stage("encode"):
        capacity = part_capacity(chosen.capacity, size, length, room)
        parts = _cut(chosen, ranks, length, capacity, _next_step(memory, u))
        usable = message.finite == 1
        rows = [encode(part, usable, message.encoding) for part in parts.each]
    received = group.all_to_all(torch.stack([row.buffer for row in rows]))
    with stage("decode"):
        mean, arrived = mean_of_gathered(rows[group.rank], received)
        assert mean is not None, "no target was given"
    with stage("encode"):
        kept = _kept(memory, group, length, u)
        answer = _encode_all(mean[:-1] + kept, arrived, back)
    gathered = group.all_gather(answer.buffer)
    with stage("decode"):
        means, ok = answer.unpack_all(gathered)
        values = u.new_zeros(size + 1)
        values[:size] = in_order(torch.stack([part.values for part in means]), size)
        update = torch.where(ok, values, float("nan"))
        lost = answer.chosen.values - answer.delivered.values
        memory[kept_name(group.rank, ranks)] = torch.where(ok, lost, kept)
        sent = parts.joined([row.delivered.values for row in rows])
    return Outcome(update, Entries(sent), ok)


def part_length(size: int, ranks: int) -> int:
    """Return the entries of one part: whole blocks, and enough of them for `size` entries."""
    return BLOCK * -(-size // (BLOCK * ranks))


def by_part(flat: Tensor, ranks: int) -> Tensor:
    """Return the entries by part [ranks, length]; zeros behind the last one."""
    length = part_length(flat.numel(), ranks)
    padded = flat.new_zeros(ranks * length)
    padded[: flat.numel()] = flat
    return padded.view(-1, ranks, BLOCK).transpose(0, 1).reshape(ranks, length)


def in_order(parts: Tensor, size: int) -> Tensor:
    """Return the `size` entries that `by_part` dealt out."""
    return parts.view(len(parts), -1, BLOCK).transpose(0, 1).reshape(-1)[:size]


def part_capacity(k: int, size: int, length: int, room: float) -> int:
    """Return the entries that one rank sends to one owner at most."""
    return min(k, length, int(-(-room * k * length // size)))


def kept_name(rank: int, ranks: int) -> str:
    """Return the key in memory of the rounding that a rank keeps.

    It names the part, because the buffer of another number of ranks is of other entries.
    """
    return f"owner.kept.{rank}.{ranks}"


def _kept(memory: Memory, group: Group, length: int, u: Tensor) -> Tensor:
    """Return the rounding that this owner kept; zeros at first."""
    name = kept_name(group.rank, group.size)
    if stale := [key for key in memory if key.startswith("owner.kept.") and key != name]:
        log.warning("owner: the rounding kept by another number of ranks is dropped")
        for key in stale:
            del memory[key]
    kept = memory.get(name)
    return u.new_zeros(length) if kept is None else kept


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


@dataclass(frozen=True)
class _Parts:
    """Entries of one rank, cut into parts.

    each: the entries of each part, by their place in the part.
    joined: from the values that owners see, the entries of all parts as one Sparse.
    """

    each: list[Sparse]
    joined: Callable[[list[Tensor]], Sparse]


def _cut(chosen: Sparse, ranks: int, length: int, capacity: int, step: Tensor) -> _Parts:
    """Return the entries by part, at most `capacity` of each part."""
    if chosen.common and chosen.capacity == chosen.size:
        return _cut_everything(chosen, ranks, length)
    spare, device = ranks * length, chosen.indices.device
    block, real = chosen.indices.long() // BLOCK, chosen.indices < chosen.size
    part, place = block % ranks, block // ranks * BLOCK + chosen.indices % BLOCK
    cell = torch.where(real, part * length + place, spare)
    is_chosen = torch.zeros(spare + 1, dtype=torch.int32, device=device).index_fill_(0, cell, 1)
    order = is_chosen[:spare].view(ranks, length).cumsum(1, dtype=torch.int32)
    counts = order[:, -1].long()
    fits = counts.clamp(max=capacity)
    # Of more entries than fit, a run is sent that goes on at the first one behind the last.
    begin = torch.where(counts > capacity, step * capacity % counts.clamp(min=1), 0)
    around = (begin + fits - counts).clamp(min=0)
    number = order.view(-1)[cell.clamp(max=spare - 1)] - 1
    slot = torch.where(number < around[part], number, number - begin[part] + around[part])
    sent = (number < around[part]) | (number >= begin[part])
    sent &= real & (slot < fits[part])
    # The spare last slot takes the entries that are not sent.
    slot = torch.where(sent, part * capacity + slot, ranks * capacity)
    indices = chosen.indices.new_full((ranks * capacity + 1,), length)
    values = chosen.values.new_zeros(ranks * capacity + 1)
    indices.scatter_(0, slot, torch.where(sent, place, length).to(torch.int32))
    values.scatter_(0, slot, torch.where(sent, chosen.values, 0))
    rows = indices[:-1].view(ranks, capacity), values[:-1].view(ranks, capacity)
    each = [
        Sparse(i, v, count, length, chosen.common)
        for i, v, count in zip(*rows, fits.to(torch.int32), strict=True)
    ]

    def joined(seen: list[Tensor]) -> Sparse:
        flat = torch.cat([*seen, seen[0].new_zeros(1)])
        end = torch.where(sent, sent.cumsum(0) - 1, chosen.capacity)
        indices = chosen.indices.new_full((chosen.capacity + 1,), chosen.size)
        indices.scatter_(0, end, torch.where(sent, chosen.indices, chosen.size))
        values = flat.new_zeros(chosen.capacity + 1).scatter_(0, end, flat[slot])
        count = sent.sum(dtype=torch.int32)
        return replace(chosen, indices=indices[:-1], values=values[:-1], count=count)

    return _Parts(each, joined)


def _cut_everything(chosen: Sparse, ranks: int, length: int) -> _Parts:
    """Return all entries by part; no index travels."""
    values = by_part(chosen.values, ranks)
    # Places behind the last entry are padding.
    numbers = by_part(chosen.indices + 1, ranks)
    places = torch.arange(length, dtype=torch.int32, device=values.device)
    indices = torch.where(numbers > 0, places, length)
    counts = (numbers > 0).sum(1, dtype=torch.int32)
    each = [Sparse(i, v, n, length, True) for i, v, n in zip(indices, values, counts, strict=True)]

    def joined(seen: list[Tensor]) -> Sparse:
        return replace(chosen, values=in_order(torch.stack(seen), chosen.size))

    return _Parts(each, joined)


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
    there = encoding.settled(size, capacity)
    return (
        nbytes(part_capacity(capacity, size, length, room), there, length),
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
    there, answer = _halves(network.workers, size, capacity, encoding, _BACK, _ROOM)
    return [network.everyone(others * there, others), network.ring(others * answer, others)]


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
    legs=owner_legs,
    received=owner_received,
    work=owner_work,
    # The way back takes 4 bits for every entry, however few were chosen.
    suits=lambda density, indices: density >= 0.05,
)
