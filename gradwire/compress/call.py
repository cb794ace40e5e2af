"""`gradwire.compress`: one method alone, on any flat tensor."""

from typing import Any

import torch
from torch import Tensor

from gradwire.accumulate.schedule import entry_count
from gradwire.compress import METHODS
from gradwire.config import check_density
from gradwire.errors import ConfigError, unknown
from gradwire.registry import check_options
from gradwire.types import MAX_SIZE, Memory, Sparse


@torch.no_grad()
def compress(
    u: Tensor,
    method: str = "topk",
    density: float | None = None,
    k: int | None = None,
    **options: Any,
) -> Sparse:
    """Return the entries of flat `u` that `method` would send, without padding.

        sparse = gradwire.compress(u, method="topk", density=0.001)
        u - sparse.dense()          # the part that would be kept

    Give `density`, a share in (0, 1], or `k`, a number of entries. The default is density 0.001.
    """
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    check_options(options, method)
    _check_vector(u)
    if density is not None and k is not None:
        raise ConfigError(f"give density or k, not both; got density={density!r} and k={k!r}")
    if k is None:
        k = entry_count(check_density(0.001 if density is None else density, use_k=True), u.numel())
    elif not isinstance(k, int) or isinstance(k, bool) or not 0 <= k <= u.numel():
        raise ConfigError(f"k must be a whole number in 0..{u.numel()}, the size of u; got {k!r}")
    if k == 0:
        indices = torch.empty(0, dtype=torch.int32, device=u.device)
        return Sparse(indices, u[:0].clone(), indices.sum(dtype=torch.int32), u.numel())
    return METHODS[method].run(u.contiguous(), k, Memory(), None, **options).trim()


def _check_vector(u: Tensor) -> None:
    if not isinstance(u, Tensor):
        raise ConfigError(f"u must be a tensor, got {type(u).__name__}")
    if u.dim() != 1 or u.layout is not torch.strided:
        raise ConfigError(f"u must be flat, got shape {tuple(u.shape)}: pass u.reshape(-1)")
    if not 0 < u.numel() <= MAX_SIZE:
        raise ConfigError(f"u must have 1 to {MAX_SIZE:,} entries, got {u.numel():,}")
    if not u.is_floating_point():
        raise ConfigError(f"u must be of a floating-point dtype, got {u.dtype}")
    if u.is_cuda and u.dtype == torch.float64:
        raise ConfigError("u is float64, which CUDA kernels would compare as fp32: pass u.float()")
    if not bool(torch.isfinite(u).all()):
        count = int((~torch.isfinite(u)).sum())
        raise ConfigError(
            f"u has {count} entries that are not finite: there is no largest among them"
        )
