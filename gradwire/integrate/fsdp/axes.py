"""The two axes of a sharded model: the shards of one replica, and the replicas of one shard."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gradwire.errors import AttachError
from gradwire.ranks.distributed import DistributedGroup

_FIX = 'give mesh["replicate"].get_group(), the axis that the model is not sharded on'


def replica_group(replicate_group: Any) -> dist.ProcessGroup:
    """Return the process group over the replicas; raise AttachError for anything else."""
    group = replicate_group
    if group is None:
        raise AttachError(f"a model sharded by fully_shard needs replicate_group: {_FIX}")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise AttachError(f"replicate_group is a mesh of {group.ndim} axes: {_FIX}")
        group = group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise AttachError(f"this rank is not in replicate_group: {_FIX}")
    if not isinstance(group, dist.ProcessGroup):
        raise AttachError(
            f"replicate_group must be a process group, got {type(group).__name__}: {_FIX}"
        )
    return group


def check_axes(
    replicas: dist.ProcessGroup, shards: dist.ProcessGroup, device: torch.device
) -> None:
    """Raise AttachError unless the replicas are the ranks that hold this rank's shard.

    This is a collective call over the replicas.
    """
    rank = dist.get_rank()
    across = dist.get_process_group_ranks(replicas)
    inside = dist.get_process_group_ranks(shards)
    common = sorted(set(across) & set(inside))
    if common != [rank]:
        raise AttachError(
            f"replicate_group {across} and the shard mesh {inside} share ranks {common}, not only "
            f"rank {rank}: {_FIX}"
        )
    position = torch.tensor([inside.index(rank), len(inside)], dtype=torch.int64, device=device)
    rows = DistributedGroup(replicas, device).all_gather(position).tolist()
    for other, row in zip(across, rows, strict=True):
        if row != rows[0]:
            raise AttachError(
                f"replicate_group {across} joins different parts of the model: rank {across[0]} "
                f"holds shard {rows[0][0]} of {rows[0][1]}, rank {other} shard {row[0]} of "
                f"{row[1]}: {_FIX}"
            )
