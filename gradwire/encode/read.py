"""Read a message from anywhere, and check every byte before it is used."""

import torch
from torch import Tensor

from gradwire.encode.format import (
    HEADER,
    INDICES,
    MAGIC,
    VALUES,
    WITHOUT_ZERO,
    Encoding,
    nbytes,
    parts,
)
from gradwire.encode.indices import get_indices, put_indices
from gradwire.encode.values import get_values
from gradwire.errors import MessageError
from gradwire.types import MAX_SIZE, Sparse


def decode(buffer: Tensor, common: Tensor | None = None) -> tuple[Sparse, bool]:
    """Return the entries of `buffer`, and True if its sender was finite.

    Lengths, counts, order and range are checked first. Raise MessageError with the reason if one is
    wrong. The checks ask the host.
    common: the indices of a message that carries none.
    """
    if buffer.dtype != torch.uint8 or buffer.dim() != 1:
        raise MessageError(
            f"a message is a flat uint8 tensor, got {buffer.dtype} of {buffer.dim()}-d"
        )
    if buffer.numel() < HEADER:
        raise MessageError(
            f"a message has at least {HEADER} bytes, got {buffer.numel()}: truncated"
        )
    magic, size, capacity, count, finite, code, length, reserved = _words(buffer)
    if magic != MAGIC:
        raise MessageError(_wrong_magic(magic))
    encoding = _encoding(code)
    if not 0 <= size <= MAX_SIZE or not 0 <= capacity <= size:
        raise MessageError(f"size {size} and capacity {capacity} do not fit: 0 <= capacity <= size")
    if not 0 <= count <= capacity:
        raise MessageError(f"count {count} is outside 0..{capacity}, the capacity")
    expected = nbytes(capacity, encoding, size)
    if length != expected or length != buffer.numel():
        raise MessageError(
            f"{buffer.numel()} bytes for a message of {expected} that says {length}: truncated or "
            f"padded"
        )
    if finite not in (0, 1) or reserved != 0:
        raise MessageError(
            f"finite flag {finite} and reserved word {reserved} must be 0 or 1, and 0"
        )
    index_bytes, value_bytes = parts(buffer, size, capacity, encoding)
    values = get_values(encoding.values, value_bytes, capacity)
    if encoding.indices == "common":
        if common is None or common.numel() != capacity:
            raise MessageError(f"the message carries no indices: pass the {capacity} common ones")
        indices = common
    elif encoding.indices == "int32":
        indices = index_bytes.view(torch.int32)
    else:
        indices = get_indices(encoding.indices, index_bytes, size, capacity)
        if not torch.equal(put_indices(encoding.indices, indices, size), index_bytes):
            raise MessageError(f"the {encoding.indices} indices are damaged")
    if encoding.values in WITHOUT_ZERO:
        values = torch.where(indices < size, values, 0)
    _check_entries(indices, values, count, size)
    counted = torch.tensor(count, dtype=torch.int32, device=buffer.device)
    return Sparse(indices, values, counted, size, encoding.indices == "common"), bool(finite)


def _check_entries(indices: Tensor, values: Tensor, count: int, size: int) -> None:
    real = indices[:count]
    if count and (int(real.min()) < 0 or int(real.max()) >= size):
        raise MessageError(f"an index is outside 0..{size - 1}")
    if count > 1 and not bool((real[1:] > real[:-1]).all()):
        raise MessageError("indices are not ascending and unique")
    if bool((indices[count:] != size).any()):
        raise MessageError(f"padding after entry {count} does not point at {size}")
    if not bool(torch.isfinite(values).all()):
        raise MessageError("a value is not finite")


def _words(buffer: Tensor) -> list[int]:
    return buffer[:HEADER].clone().view(torch.int32).tolist()


def _wrong_magic(magic: int) -> str:
    start = (magic % 2**32).to_bytes(4, "little")
    if start[:3] == b"GRW":
        return (
            f"message of wire version {start[3]}, this is version 1: run one gradwire on all ranks"
        )
    return f"not a gradwire message: it begins with {start!r}, not b'GRW'"


def _encoding(code: int) -> Encoding:
    values = [name for name, c in VALUES.items() if c == code & 0xFF]
    indices = [name for name, c in INDICES.items() if c == code >> 8]
    if not values or not indices:
        raise MessageError(f"unknown encoding {code:#x}")
    return Encoding(values[0], indices[0])
