"""Shards of matrices that fully_shard cut: whole where a rule needs them, and back again.

The ranks of an island share the matrices: each gets some of them whole, and works on these alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def needs_gathering(parameter: Any) -> bool:
    """Return True if this rank lacks a part of the parameter's matrices.

    A stack of matrices that is cut along its first dimension has whole ones on every rank.
    """
    if not hasattr(parameter, "placements"):
        return False
    return not (parameter.dim() == 3 and all(p.is_shard(0) for p in parameter.placements))


def can_share(parameter: Any) -> bool:
    """Return True if a parameter is cut along one axis of ranks, so that matrices can be dealt."""
    return parameter.device_mesh.ndim == 1 and parameter.placements[0].is_shard()


def deal_matrices(shards: Sequence[Tensor], like: Any) -> Tensor:
    """Return this rank's share of whole tensors, of which `shards` are its parts, stacked.

    All are cut as `like` is. All ranks of an island call it together.
    """
    (cut,) = like.placements
    size = torch.Size([len(shards), *like.size()])
    return _move(torch.stack(list(shards)), like.device_mesh, cut.dim + 1, 0, size)


def deal_back(share: Tensor, count: int, like: Any) -> tuple[Tensor, ...]:
    """Return this rank's parts of all `count` tensors, of which ranks have whole ones by turns."""
    (cut,) = like.placements
    size = torch.Size([count, *like.size()])
    return _move(share, like.device_mesh, 0, cut.dim + 1, size).unbind()


def _move(local: Tensor, mesh: Any, before: int, after: int, size: torch.Size) -> Tensor:
    """Cut a stack of tensors along another dimension: an all-to-all inside the island."""
    from torch.distributed.tensor import DTensor, Shard

    stride = torch.empty(size, dtype=torch.float32, device="meta").stride()
    stack = DTensor.from_local(
        local, mesh, [Shard(before)], run_check=False, shape=size, stride=stride
    )
    part: Tensor = stack.redistribute(placements=[Shard(after)]).to_local()
    return part


def gather_whole(local: Tensor, like: Any) -> Tensor:
    """Return the whole tensor of which `local` is this rank's shard, cut as `like` is.

    All ranks of an island call it together.
    """
    from torch.distributed.tensor import DTensor

    whole = DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.size(),
        stride=like.stride(),
    )
    return whole.full_tensor()


def cut_out(whole: Tensor, like: Any) -> Tensor:
    """Return this rank's shard of a whole tensor, cut as `like` is. Nothing is sent."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    part: Tensor = everywhere.redistribute(placements=like.placements).to_local()
    return part
