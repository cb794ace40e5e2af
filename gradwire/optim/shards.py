"""Shards of a matrix that fully_shard cut: all of it where a rule needs it, and back again."""

from typing import Any

from torch import Tensor


def needs_gathering(parameter: Any) -> bool:
    """Return True if this rank lacks a part of the parameter's matrices.

    A stack of matrices that is cut along its first dimension has whole ones on every rank.
    """
    if not hasattr(parameter, "placements"):
        return False
    return not (parameter.dim() == 3 and all(p.is_shard(0) for p in parameter.placements))


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
