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
        use_local_synchronization=not _is_everyone(ranks),
        pg_options=options,
    )
    _kinds[group] = kind
    return group


def give_back(group: dist.ProcessGroup) -> None:
    """End a communicator that no rank uses any more. All its ranks call this in the same order.

    One over a part of the ranks waits for `take` instead: torch would give the next one the same
    name, under which the store still has the addresses of this one, and ranks would not meet.
    """
    if _is_everyone(_kinds[group][0]):
        dist.destroy_process_group(group)
    else:
        _idle.setdefault(dist.group.WORLD, []).append(group)


def _is_everyone(ranks: Sequence[int]) -> bool:
    return len(ranks) == dist.get_world_size()
