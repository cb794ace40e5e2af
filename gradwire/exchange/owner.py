"""Owner: every part of the vector has an owner, who sends its mean back in a few bits."""

import logging
from dataclasses import replace
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

_BACK, _ROOM = "int4", 1.25


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

    A part is a run of blocks of 256 entries. What rank p keeps is d / P entries of its memory, and
    never in a residual. In the law it counts P times: the sum of all u is P times the update, plus
    all residuals, plus P times the growth of what owners keep.

    The message for a part has room for `room` times an even share of the entries. Of more entries a
    run is sent that begins elsewhere in each step; the others stay in the residual.
    """
    size, ranks, chosen = u.numel(), group.size, message.chosen
    length = part_length(size, ranks)
    with stage("encode"):
        capacity = part_capacity(chosen.capacity, size, length, room)
        parts = _Parts(chosen, ranks, length, capacity, _next_step(memory, u))
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
        values = torch.cat([*(part.values for part in means), u.new_zeros(1)])
        update = torch.where(ok, values[: size + 1], float("nan"))
        lost = answer.chosen.values - answer.delivered.values
        memory[kept_name(group.rank, ranks)] = torch.where(ok, lost, kept)
        sent = parts.joined([row.delivered.values for row in rows])
    return Outcome(update, Entries(sent), ok)


def part_length(size: int, ranks: int) -> int:
    """Return the entries of one part: whole blocks, and enough of them for `size` entries."""
    return BLOCK * -(-size // (BLOCK * ranks))


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


class _Parts:
    """Entries of one rank, cut into one Sparse of `capacity` entries per part."""

    def __init__(
        self, chosen: Sparse, ranks: int, length: int, capacity: int, step: Tensor
    ) -> None:
        device = chosen.indices.device
        starts = length * torch.arange(ranks + 1, dtype=torch.int64, device=device)
        # Padding lies at `size`, which is below the end of the last part.
        ends = starts.clamp(max=chosen.size).to(torch.int32)
        first = torch.searchsorted(chosen.indices, ends)
        counts = first.diff().unsqueeze(1)
        fits = counts.clamp(max=capacity)
        # Of more entries than fit, a run is sent that goes on at the first one behind the last.
        begin = torch.where(counts > capacity, step * capacity % counts.clamp(min=1), 0)
        around = (begin + fits - counts).clamp(min=0)
        slot = torch.arange(capacity, dtype=torch.int64, device=device)
        place = torch.where(slot < around, slot, begin + slot - around)
        self._real = slot < fits
        source = (first[:-1].unsqueeze(1) + place).clamp(max=max(0, chosen.capacity - 1))
        self._chosen, self._indices = chosen, chosen.indices[source]
        local = self._indices - starts[:-1].unsqueeze(1)
        indices = torch.where(self._real, local, length).to(torch.int32)
        values = torch.where(self._real, chosen.values[source], 0)
        self.each = [
            Sparse(indices[p], values[p], fits[p, 0].to(torch.int32), length, chosen.common)
            for p in range(ranks)
        ]
        """The entries of each part, by their place in the part."""

    def joined(self, seen: list[Tensor]) -> Sparse:
        """Return all entries that were sent, with the values that their owners saw."""
        chosen, real = self._chosen, self._real.view(-1)
        # The spare last place takes the slots without an entry.
        slot = torch.where(real, real.cumsum(0) - 1, chosen.capacity)
        indices = chosen.indices.new_full((chosen.capacity + 1,), chosen.size)
        values = chosen.values.new_zeros(chosen.capacity + 1)
        indices.scatter_(0, slot, torch.where(real, self._indices.view(-1), chosen.size))
        values.scatter_(0, slot, torch.where(real, torch.cat(seen), 0))
        count = real.sum(dtype=torch.int32)
        return replace(chosen, indices=indices[:-1], values=values[:-1], count=count)


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
