"""The reference of pack: plain torch, any device, no host sync."""

import torch
from torch import Tensor

HEADER = 32


def pack_torch(
    template: Tensor,
    indices: Tensor | None,
    values: Tensor,
    count: Tensor,
    finite: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """See `pack`."""
    out = template.clone()
    words = out[:HEADER].view(torch.int32)
    words[3] = count
    words[4] = finite
    split = HEADER
    if indices is not None:
        split += 4 * indices.numel()
        out[HEADER:split].view(torch.int32).copy_(indices)
    limit = torch.finfo(dtype).max
    body = out[split : split + values.numel() * dtype.itemsize].view(dtype)
    body.copy_(values.clamp(-limit, limit))
    return out
