"""A reader of arrays from a pickle that runs none of the pickle's code.

A pickle is a program. This reader gives the program containers, text and numbers, and stand-ins for
the names that an array of bytes needs. Any other name is an error. numpy is not used.
"""

import io
import pickle
from math import prod
from typing import Any

import torch
from torch import Tensor


class _Dtype:
    """Stand-in for numpy.dtype; keeps its code, e.g. "u1"."""

    def __init__(self, code: str | bytes = "", *_: object) -> None:
        self.code = code.decode("latin1") if isinstance(code, bytes) else code

    def __setstate__(self, state: object) -> None:
        """Ignore byte order and layout, which do not matter for one-byte numbers."""


class Array:
    """Stand-in for numpy.ndarray; keeps its shape, type and bytes."""

    shape: tuple[int, ...] = ()
    dtype: _Dtype = _Dtype()
    by_column: bool = False
    raw: bytes = b""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.dtype, self.by_column, self.raw = state

    def tensor(self) -> Tensor:
        """Return the array as a uint8 tensor."""
        if self.dtype.code != "u1":
            raise pickle.UnpicklingError(f"array of type {self.dtype.code!r}, not of bytes")
        if len(self.raw) != prod(self.shape):
            raise pickle.UnpicklingError(f"{len(self.raw)} bytes for an array of {self.shape}")
        flat = torch.frombuffer(bytearray(self.raw), dtype=torch.uint8)
        if self.by_column:
            return flat.reshape(self.shape[::-1]).permute(*range(len(self.shape))[::-1])
        return flat.reshape(self.shape)


def _reconstruct(*_: object) -> Array:
    return Array()


class _Latin1Encoder:
    """Stand-in for codecs.encode, which makes bytes from text in a pickle.

    Each call makes a copy. All copies together may have `most` bytes, the length of the pickle.
    """

    def __init__(self, most: int) -> None:
        self.left = most

    def __call__(self, text: str, encoding: str) -> bytes:
        if encoding not in ("latin1", "latin-1"):
            raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r}")
        self.left -= len(text)
        if self.left < 0:
            raise pickle.UnpicklingError("it makes more bytes than it has")
        return text.encode("latin1")


ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): Array,
    ("numpy", "dtype"): _Dtype,
}


# pickle._Unpickler is written in Python. The faster one allocates as large a table as a damaged
# pickle asks for.
class _ArrayUnpickler(pickle._Unpickler):
    """An unpickler that knows only the names in `ALLOWED`."""

    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw), encoding="bytes")
        self.known = ALLOWED | {("_codecs", "encode"): _Latin1Encoder(len(raw))}

    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return self.known[module_name, global_name]
        except KeyError:
            name = f"{module_name}.{global_name}"
            raise pickle.UnpicklingError(f"it asks for {name}, which no array needs") from None


def read_pickle(raw: bytes) -> dict[str, Any]:
    """Return the dictionary in a pickle of arrays, of Python 2 too, its keys as text."""
    content = _ArrayUnpickler(raw).load()
    if not isinstance(content, dict):
        raise pickle.UnpicklingError(f"it holds a {type(content).__name__}, not a dictionary")
    return {k.decode() if isinstance(k, bytes) else str(k): v for k, v in content.items()}
