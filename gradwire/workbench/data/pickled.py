"""Arrays out of a pickle, without running it.

A pickle is a program. This reader gives it containers, text and numbers, and stand-ins for the
three names an array of bytes needs; any other name ends the reading. numpy is not involved.

It is the unpickler that is written in Python: the other one makes a table of as many entries as a
damaged pickle says.
"""

import io
import pickle
from math import prod
from typing import Any

import torch
from torch import Tensor


class Dtype:
    """Stands in for numpy.dtype: remembers its code, e.g. "u1"."""

    def __init__(self, code: str | bytes = "", *_: object) -> None:
        self.code = code.decode("latin1") if isinstance(code, bytes) else code

    def __setstate__(self, state: object) -> None:
        """The byte order and layout, which one-byte numbers do not have."""


class Array:
    """Stands in for numpy.ndarray: remembers its shape, type and bytes."""

    shape: tuple[int, ...] = ()
    dtype: Dtype = Dtype()
    by_column: bool = False
    raw: bytes = b""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.dtype, self.by_column, self.raw = state

    def tensor(self) -> Tensor:
        """The array as a uint8 tensor."""
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


class Latin1:
    """Stands in for codecs.encode, of texts that were written as bytes once.

    A copy is made for each call: no more in all than a pickle of that length can hold.
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
    ("numpy", "dtype"): Dtype,
}


class Reader(pickle._Unpickler):
    """An unpickler that knows only the names in `ALLOWED`."""

    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw), encoding="bytes")
        self.known = ALLOWED | {("_codecs", "encode"): Latin1(len(raw))}

    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return self.known[module_name, global_name]
        except KeyError:
            name = f"{module_name}.{global_name}"
            raise pickle.UnpicklingError(f"it asks for {name}, which no array needs") from None


def read_pickle(raw: bytes) -> dict[str, Any]:
    """The dictionary in a pickle of arrays, its keys as text; Python 2's pickles too."""
    found = Reader(raw).load()
    if not isinstance(found, dict):
        raise pickle.UnpicklingError(f"it holds a {type(found).__name__}, not a dictionary")
    return {k.decode() if isinstance(k, bytes) else str(k): v for k, v in found.items()}
