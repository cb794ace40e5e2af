"""Read messages in any encoding as int32 indices and fp32 values."""

import torch
from torch import Tensor

from gradwire.encode.format import HEADER, Encoding, index_bytes, nbytes, value_bytes
from gradwire.encode.indices import get_indices
from gradwire.encode.values import get_values
from gradwire.kernels.dispatch import versions
from gradwire.kernels.messages import MANY


def unpack(
    messages: Tensor, size: int, capacity: int, encoding: Encoding, bare: bool = False
) -> Tensor:
    """Return uint8 [ranks, bytes]: per row the header, `capacity` int32 indices, and fp32 values.

    Headers are copied unchanged. Common indices are left out. An index that is missing or outside
    becomes padding: index = size, value = 0. Zeros fill up each row to a multiple of 16 bytes.
    messages: uint8 [ranks, bytes] in `encoding`; rows need not follow each other in memory.
    bare: True if the messages end before their values, which then become zero.
    """
    # Signs have no kernel, because their writer has none.
    version = unpack_torch if encoding.values == "sign" else _unpack_on(messages.device)
    return version(messages, size, capacity, encoding, bare)


def unpack_torch(
    messages: Tensor, size: int, capacity: int, encoding: Encoding, bare: bool = False
) -> Tensor:
    """Compute `unpack` with torch ops."""
    common = encoding.indices == "common"
    length = nbytes(capacity, Encoding("fp32", "common" if common else "int32"), size)
    out = messages.new_zeros(len(messages), length)
    split = HEADER + index_bytes(encoding.indices, size, capacity)
    end = split + value_bytes(encoding.values, capacity)
    out[:, :HEADER] = messages[:, :HEADER]
    # A few messages at a time, because the intermediate tensors are large.
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


_unpack_on = versions(unpack_torch, triton="gradwire.kernels.triton.unpack.unpack_triton")
