"""The reference of pack: plain torch, any device, no host sync."""

import torch
from torch import Tensor

from gradwire.encode.indices import index_bytes, put_indices
from gradwire.encode.message import Encoding
from gradwire.encode.noise import Noise
from gradwire.encode.values import get_values, put_values, value_bytes
from gradwire.types import Sparse

HEADER = 32


def pack_torch(
    template: Tensor, sparse: Sparse, finite: Tensor, encoding: Encoding, noise: Noise | None
) -> tuple[Tensor, Tensor]:
    """See `pack`."""
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
    if encoding.values == "sign":
        seen = torch.where(sparse.indices < sparse.size, seen, 0)  # padding has a sign too
    return out, seen
