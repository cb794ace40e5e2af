"""The reference of chunks: plain torch, any device, no host sync."""

import torch
from torch import Tensor

from gradwire.kernels.topk_torch import topk_torch


def chunks_torch(
    u: Tensor, chunk: int, each: int, last: int, maxima: Tensor | None = None, group: int = 0
) -> tuple[Tensor, Tensor]:
    """See `chunks`. A stable sort of every chunk."""
    rows = u.numel() // chunk
    body = u[: rows * chunk].view(rows, chunk).abs()
    order = body.sort(dim=1, descending=True, stable=True).indices[:, :each]
    starts = torch.arange(0, rows * chunk, chunk, dtype=torch.int64, device=u.device)
    whole = (order.sort(dim=1).values + starts[:, None]).view(-1).to(torch.int32)
    rest = topk_torch(u[rows * chunk :], last) + rows * chunk
    indices = torch.cat([whole, rest.to(torch.int32)])
    return indices, u[indices]
