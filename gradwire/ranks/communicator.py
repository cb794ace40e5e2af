"""Communicators of our own: sharing the model's would mix up the order of collectives."""

import hashlib
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from gradwire.ranks.group import DistributedGroup

Kind = tuple[list[int], timedelta | None, bool]

_kinds: "weakref.WeakKeyDictionary[dist.ProcessGroup, Kind]" = weakref.WeakKeyDictionary()
_idle: "weakref.WeakKeyDictionary[Any, list[dist.ProcessGroup]]" = weakref.WeakKeyDictionary()
"""By the group of the whole job, with which they end."""

OFFERS = 16
"""How many idle communicators a rank offers at most when one is wanted."""


def take(
    ranks: Sequence[int],
    timeout: timedelta | None,
    over: "DistributedGroup",
    options: Any = None,
) -> dist.ProcessGroup:
    """A communicator over `ranks`, this rank among them; `options` of its backend.

    One that every one of these ranks has given back, where there is one of the same kind. A
    collective call of all ranks of `over`, to which `ranks` belong.
    """
    kind = list(ranks), timeout, options is not None
    idle = _idle.get(dist.group.WORLD, [])
    offered = {_number(group): group for group in idle if _kinds[group] == kind}
    for number in _common(over, ranks, list(offered)[:OFFERS]):
        idle.remove(offered[number])
        return offered[number]
    group = dist.new_group(
        list(ranks),
        timeout=timeout,
        use_local_synchronization=len(ranks) < dist.get_world_size(),
        pg_options=options,
    )
    _kinds[group] = kind
    return group


def _common(over: "DistributedGroup", ranks: Sequence[int], mine: list[int]) -> list[int]:
    """Those of `mine` that all of `ranks` offer, in the order of the first of them."""
    row = torch.tensor([*mine, *[0] * (OFFERS - len(mine))], dtype=torch.int64, device=over.device)
    before = over.bytes_sent, over.rounds
    table = over.all_gather(row).tolist()
    over.bytes_sent, over.rounds = before  # statistics are of gradients
    everyone = dist.get_process_group_ranks(over.process_group)
    offers = [row for rank, row in zip(everyone, table, strict=True) if rank in ranks]
    return [n for n in offers[0] if n and all(n in offer for offer in offers)]


def _number(group: dist.ProcessGroup) -> int:
    """A number for a communicator that is the same on all its ranks, and not 0."""
    return int.from_bytes(hashlib.sha256(group.group_name.encode()).digest()[:7], "little") + 1


def give_back(group: dist.ProcessGroup) -> None:
    """This rank uses it no more: once all its ranks have said so, `take` may.

    Not destroyed, because torch names a group by how many there are: the next one over the same
    ranks would get the same name, under which the store still has the addresses of this one.
    """
    if dist.is_initialized() and group in _kinds:
        _idle.setdefault(dist.group.WORLD, []).append(group)
