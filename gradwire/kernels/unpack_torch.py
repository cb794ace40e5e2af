"""The reference of unpack: plain torch, any device, no host sync."""

import torch
from torch import Tensor

from gradwire.encode.indices import get_indices, index_bytes
from gradwire.encode.message import Encoding, nbytes
from gradwire.encode.values import get_values, value_bytes
from gradwire.kernels.decode_torch import HEADER, MANY


def unpack_torch(
    messages: Tensor, size: int, capacity: int, encoding: Encoding, bare: bool = False
) -> Tensor:
    """See `unpack`."""
    common = encoding.indices == "common"
    length = nbytes(capacity, Encoding("fp32", "common" if common else "int32"), size)
    out = messages.new_zeros(len(messages), length)
    split = HEADER + index_bytes(encoding.indices, size, capacity)
    end = split + value_bytes(encoding.values, capacity)
    out[:, :HEADER] = messages[:, :HEADER]
    together = max(1, MANY // max(1, capacity))
    for rows, part in zip(out.split(together), messages.split(together), strict=True):
        words = rows[:, HEADER : HEADER + (4 if common else 8) * capacity].view(torch.int32)
        if not common:
            indices = get_indices(encoding.indices, part[:, HEADER:split], size, capacity)
            words[:, :capacity] = indices
        if bare:
            continue
        values = get_values(encoding.values, part[:, split:end], capacity)
        if not common:
            values = torch.where(indices < size, values, 0)
        words[:, -capacity:].view(torch.float32).copy_(values)
    return out
