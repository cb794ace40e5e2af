"""Communicators of our own: sharing the model's would mix up the order of collectives."""

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

Kind = tuple[list[int], timedelta | None, bool]

_kinds: "weakref.WeakKeyDictionary[dist.ProcessGroup, Kind]" = weakref.WeakKeyDictionary()
_idle: "weakref.WeakKeyDictionary[Any, list[dist.ProcessGroup]]" = weakref.WeakKeyDictionary()
"""By the group of the whole job, with which they end."""


def take(ranks: Sequence[int], timeout: timedelta | None, options: Any = None) -> dist.ProcessGroup:
    """A communicator over `ranks`, which all call this in the same order; `options` of its backend.

    One that was given back, where there is one of the same kind.
    """
    kind = list(ranks), timeout, options is not None
    idle = _idle.get(dist.group.WORLD, [])
    for group in idle:
        if _kinds[group] == kind:
            idle.remove(group)
            return group
    group = dist.new_group(
        list(ranks),
        timeout=timeout,
        use_local_synchronization=len(ranks) < dist.get_world_size(),
        pg_options=options,
    )
    _kinds[group] = kind
    return group


def give_back(group: dist.ProcessGroup) -> None:
    """No rank uses it any more: the next `take` may. All its ranks call this in the same order.

    Not destroyed, because torch names a group by how many there are: the next one over the same
    ranks would get the same name, under which the store still has the addresses of this one.
    """
    _idle.setdefault(dist.group.WORLD, []).append(group)
