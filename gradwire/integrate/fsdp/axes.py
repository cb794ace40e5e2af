"""The two axes of a sharded model: ranks that hold its parts, ranks that hold the same part."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gradwire.errors import AttachError
from gradwire.ranks.communicator import take
from gradwire.ranks.group import DistributedGroup

FIX = 'give mesh["replicate"].get_group(), the axis that the model is not sharded on'


def group_of(replicate_group: Any) -> dist.ProcessGroup:
    """The process group over the replicas; anything else is refused."""
    given = replicate_group
    if given is None:
        raise AttachError(f"a model sharded by fully_shard needs replicate_group: {FIX}")
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            raise AttachError(f"replicate_group is a mesh of {given.ndim} axes: {FIX}")
        given = given.get_group()
    if given == dist.GroupMember.NON_GROUP_MEMBER:
        raise AttachError(f"this rank is not in replicate_group: {FIX}")
    if not isinstance(given, dist.ProcessGroup):
        raise AttachError(
            f"replicate_group must be a process group, got {type(given).__name__}: {FIX}"
        )
    return given


def check_axes(
    replicas: dist.ProcessGroup, shards: dist.ProcessGroup, device: torch.device
) -> None:
    """Raises unless the replicas are those ranks that hold this rank's part of the model.

    A collective call over the replicas.
    """
    rank = dist.get_rank()
    across = dist.get_process_group_ranks(replicas)
    inside = dist.get_process_group_ranks(shards)
    common = sorted(set(across) & set(inside))
    if common != [rank]:
        raise AttachError(
            f"replicate_group {across} and the shard mesh {inside} share ranks {common}, not only "
            f"rank {rank}: {FIX}"
        )
    mine = [inside.index(rank), len(inside)]
    place = torch.tensor(mine, dtype=torch.int64, device=device)
    rows = DistributedGroup(replicas, device).all_gather(place).tolist()
    for other, row in zip(across, rows, strict=True):
        if row != rows[0]:
            raise AttachError(
                f"replicate_group {across} joins different parts of the model: rank {across[0]} "
                f"holds shard {rows[0][0]} of {rows[0][1]}, rank {other} shard {row[0]} of "
                f"{row[1]}: {FIX}"
            )


def own_group(
    ranks: dist.ProcessGroup, device: torch.device, timeout: timedelta
) -> DistributedGroup:
    """A communicator of our own over the same ranks. A collective call."""
    over = DistributedGroup(ranks, device, timeout)
    own = take(dist.get_process_group_ranks(ranks), timeout, over)
    return DistributedGroup(own, device, timeout)
