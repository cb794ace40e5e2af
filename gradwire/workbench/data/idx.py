"""The idx format of the MNIST files: a big-endian header, then bytes."""

import gzip
import struct
import zlib
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from gradwire.workbench.data.dataset import DataError

UNSIGNED_BYTE = 0x08
BLOCK, MOST = 1 << 24, 1 << 31
"""Bytes read at once, and the most that are read of a file."""


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Return the uint8 tensor in an idx file, plain or `.gz`.

    Layout: two zero bytes, the type (8 = unsigned byte), the number of dimensions, and each
    dimension as a big-endian uint32. The values follow in row order.
    """
    header = 4 + 4 * dimensions
    raw = _read_bytes(path, header)
    if len(raw) < header or raw[:4] != bytes([0, 0, UNSIGNED_BYTE, dimensions]):
        raise DataError(
            f"{path} is not an idx file of unsigned bytes in {dimensions} dimensions: "
            f"it starts with {raw[:4].hex() or 'nothing'}. Fetch it again."
        )
    shape = struct.unpack(f">{dimensions}I", raw[4:header])
    promised = header + prod(shape)
    if promised == header or promised > MOST:
        raise DataError(
            f"{path} promises {' x '.join(map(str, shape))} values: from 1 to {MOST:,} are read. "
            f"Fetch it again."
        )
    # One byte more than promised, and no more: a small .gz could otherwise fill the memory.
    raw = _read_bytes(path, promised + 1)
    if len(raw) != promised:
        size = f"{len(raw):,}" if len(raw) < promised else "more"
        raise DataError(
            f"{path} holds {size} bytes where its header promises {promised:,}. Fetch it again."
        )
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=header).reshape(shape)


def _read_bytes(path: Path, most: int) -> bytes:
    """Return the first `most` bytes of a file, unpacked."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            parts, left = [], most
            while left and (part := file.read(min(left, BLOCK))):
                parts.append(part)
                left -= len(part)
            return b"".join(parts)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} cannot be unpacked ({error}). Fetch it again.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).") from error
