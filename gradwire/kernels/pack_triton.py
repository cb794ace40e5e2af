"""pack on CUDA: one launch writes the whole message."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.decode_triton import DTYPES
from gradwire.kernels.launch_triton import Launcher
from gradwire.kernels.scan_triton import rounded

TILE = 1024


@triton.jit(do_not_specialize=["capacity", "room"])
def _pack(
    out, template, indices, values, count, finite, capacity, room, limit,
    VALUES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = i < capacity
    body = out + 8
    if indices is not None:
        tl.store(out + 8 + i, tl.load(indices + i, mask=inside, other=0), mask=inside)
        body += capacity
    value = tl.load(values + i, mask=inside, other=0).to(tl.float32)
    value = rounded(tl.minimum(tl.maximum(value, -limit), limit), VALUES)
    # Past the entries `value` is zero, as the padding of the message is.
    tl.store(body.to(tl.pointer_type(VALUES)) + i, value, mask=i < room)
    if tl.program_id(0) == 0:
        w = tl.arange(0, 8)
        word = tl.load(template + w)
        word = tl.where(w == 3, tl.load(count).to(tl.int32), word)
        word = tl.where(w == 4, tl.load(finite).to(tl.int32), word)
        tl.store(out + w, word)


_launch = Launcher(_pack, num_warps=4)


def pack_triton(
    template: Tensor,
    indices: Tensor | None,
    values: Tensor,
    count: Tensor,
    finite: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """See `pack`. Moves 16 bytes an entry."""
    out = torch.empty_like(template)
    capacity = values.numel()
    # The values and the padding behind them, which is less than 16 bytes.
    index_bytes = 0 if indices is None else 4 * capacity
    room = (out.numel() - 32 - index_bytes) // dtype.itemsize
    aligned = (template.data_ptr() | values.data_ptr()) % 16
    aligned |= 0 if indices is None else indices.data_ptr() % 16
    _launch(
        -(-room // TILE), (dtype, values.dtype, count.dtype, indices is None, aligned),
        out, out.view(torch.int32), template.view(torch.int32), indices, values, count, finite,
        capacity, room, torch.finfo(dtype).max, DTYPES[dtype], TILE,
    )  # fmt: skip
    return out
