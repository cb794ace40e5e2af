"""Write the chosen entries as the bytes of a message."""

import torch
from torch import Tensor

from gradwire.encode.format import HEADER, WITHOUT_ZERO, Encoding, index_bytes, value_bytes
from gradwire.encode.indices import put_indices
from gradwire.encode.noise import Noise
from gradwire.encode.values import get_values, put_values
from gradwire.kernels.dispatch import versions
from gradwire.types import Sparse


def write_message(
    template: Tensor, sparse: Sparse, finite: Tensor, encoding: Encoding, noise: Noise | None
) -> tuple[Tensor, Tensor]:
    """Return (message, seen): uint8 like the template, and the fp32 values that receivers see.

    The header is the template's with word 3 (count) and word 4 (finite) filled in. Then come the
    indices and the values in `encoding`, then zeros. With `noise` rounding is stochastic.
    """
    # Signs have no kernel: a kernel would add up their mean in another order.
    version = write_message_torch if encoding.values == "sign" else _write_on(template.device)
    return version(template, sparse, finite, encoding, noise)


def write_message_torch(
    template: Tensor, sparse: Sparse, finite: Tensor, encoding: Encoding, noise: Noise | None
) -> tuple[Tensor, Tensor]:
    """Compute `write_message` with torch ops."""
    out = template.clone()
    words = out[:HEADER].view(torch.int32)
    words[3] = sparse.count
    words[4] = finite
    split = HEADER + index_bytes(encoding.indices, sparse.size, sparse.capacity)
    if split > HEADER:
        out[HEADER:split] = put_indices(encoding.indices, sparse.indices, sparse.size)
    body = out[split : split + value_bytes(encoding.values, sparse.capacity)]
    body.copy_(put_values(encoding.values, sparse.values, noise))
    seen = get_values(encoding.values, body, sparse.capacity)
    if encoding.values in WITHOUT_ZERO:
        seen = torch.where(sparse.indices < sparse.size, seen, 0)
    return out, seen


_write_on = versions(
    write_message_torch, triton="gradwire.kernels.triton.write.write_message_triton"
)
