"""Communicators for gradwire alone, handed out and taken back.

On the model's own communicators gradwire's collectives would mix with the model's. A communicator
is reused when all its ranks have given it back, because new connections take time.
"""

import hashlib
import secrets
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gradwire.ranks.group import uncounted
from gradwire.ranks.liveness import sign_stopped
from gradwire.torch_internals import group_name

if TYPE_CHECKING:
    from gradwire.ranks.distributed import DistributedGroup

_Kind = tuple[list[int], timedelta | None, bool]
"""Ranks, timeout, and True if the backend got options."""

_kinds: "weakref.WeakKeyDictionary[dist.ProcessGroup, _Kind]" = weakref.WeakKeyDictionary()
_idle: "weakref.WeakKeyDictionary[Any, list[dist.ProcessGroup]]" = weakref.WeakKeyDictionary()
"""Idle communicators by the group of the whole job, because they end with it."""

_OFFERS = 16
"""The most idle communicators that a rank offers when one is wanted."""


def take_communicator(
    ranks: Sequence[int],
    timeout: timedelta | None,
    over: "DistributedGroup",
    options: Any = None,
) -> dist.ProcessGroup:
    """Return a communicator over `ranks`, this rank among them; `options` are its backend's.

    Take an idle one of the same kind if every one of these ranks has given it back. Otherwise make
    one. A collective call of all ranks of `over`, to which `ranks` belong.
    """
    kind = list(ranks), timeout, options is not None
    idle = _idle.get(dist.group.WORLD, [])
    offered = {_number_of(group): group for group in idle if _kinds[group] == kind}
    common, token = _compare_offers(over, ranks, list(offered)[:_OFFERS])
    if common:
        idle.remove(offered[common[0]])
        return offered[common[0]]
    try:
        with group_name(f"gradwire {token:x}"):
            group = dist.new_group(
                list(ranks),
                timeout=timeout,
                use_local_synchronization=len(ranks) < dist.get_world_size(),
                pg_options=options,
            )
    except RuntimeError as error:
        sign_stopped(over.process_group.group_name, over.rank)
        what = f"a communicator of ranks {list(ranks)} failed in stage connect"
        raise over.failure(what, error) from error
    _kinds[group] = kind
    return group


def _compare_offers(
    over: "DistributedGroup", ranks: Sequence[int], offered: list[int]
) -> tuple[list[int], int]:
    """Return the numbers that all of `ranks` offer, and a token for the name of a new group.

    `offered` are this rank's. The order and the token are those of the first of these ranks.
    """
    padded = [*offered, *[0] * (_OFFERS - len(offered)), secrets.randbits(62)]
    with uncounted(over):
        table = over.all_gather(
            torch.tensor(padded, dtype=torch.int64, device=over.device)
        ).tolist()
    all_ranks = dist.get_process_group_ranks(over.process_group)
    rows = [row for rank, row in zip(all_ranks, table, strict=True) if rank in ranks]
    *offers, token = rows[0]
    return [n for n in offers if n and all(n in row[:_OFFERS] for row in rows)], token


def _number_of(group: dist.ProcessGroup) -> int:
    """Return a number for a communicator that is the same on all its ranks, and not 0."""
    return int.from_bytes(hashlib.sha256(group.group_name.encode()).digest()[:7], "little") + 1


def give_back_communicator(group: dist.ProcessGroup) -> None:
    """Note that this rank uses the communicator no more.

    `take_communicator` hands it out again once all its ranks have given it back.
    """
    # Not destroyed: other ranks may still be inside a collective, and connections take time.
    if dist.is_initialized() and group in _kinds:
        _idle.setdefault(dist.group.WORLD, []).append(group)
