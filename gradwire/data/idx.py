"""The idx format of the MNIST files: a big-endian header, then bytes."""

import gzip
import struct
import zlib
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from gradwire.data.dataset import DataError

UNSIGNED_BYTE = 0x08


def read_idx(path: Path, dimensions: int) -> Tensor:
    """The uint8 tensor in an idx file, plain or `.gz`.

    Layout: two zero bytes, the type (8 = unsigned byte), the number of dimensions, each dimension
    as a big-endian uint32, then the values in row order.
    """
    raw = _contents(path)
    header = 4 + 4 * dimensions
    if len(raw) < header or raw[:4] != bytes([0, 0, UNSIGNED_BYTE, dimensions]):
        raise DataError(
            f"{path} is not an idx file of unsigned bytes in {dimensions} dimensions: "
            f"it starts with {raw[:4].hex() or 'nothing'}. Fetch it again."
        )
    shape = struct.unpack(f">{dimensions}I", raw[4:header])
    if len(raw) != header + prod(shape):
        raise DataError(
            f"{path} holds {len(raw):,} bytes where its header promises "
            f"{header + prod(shape):,}. Fetch it again."
        )
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=header).reshape(shape)


def _contents(path: Path) -> bytes:
    """The file's bytes, unpacked."""
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} cannot be unpacked ({error}). Fetch it again.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).") from error
