"""The wire format, version 1: a header of eight little-endian int32 words, indices, values.

    word 0  magic and version      "GRW" and 1
    word 1  size                   entries of the bundle, padding slots included
    word 2  capacity               entries that this message has room for
    word 3  count                  entries that are real
    word 4  finite                 1 if every gradient entry of the sender was finite
    word 5  encoding               values code | indices code << 8
    word 6  length                 bytes of the whole message
    word 7  reserved               0

Then come the indices (see `indices`) and the values (see `values`). Zeros fill up the message to a
multiple of 16 bytes. A message of capacity 0 says only if its sender was finite.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from gradwire.encode.bits import words_for
from gradwire.errors import ConfigError, unknown
from gradwire.types import MAX_SIZE

MAGIC = int.from_bytes(b"GRW\x01", "little")
HEADER = 32
"""Bytes of the header."""

INDICES = {"int32": 0, "common": 1, "packed": 2, "bitmap": 3, "local16": 4}
"""Names of the index codes, and their numbers in the header."""
LOCAL = 1 << 16
"""Entries per block of local16."""

VALUES = {"fp32": 0, "bf16": 1, "fp16": 2, "int8": 3, "int4": 4, "sign": 5, "two-bit": 6}
"""Names of the value codes, and their numbers in the header."""
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LEVELS = {"int8": 127, "int4": 7}
"""The largest level of a code; the smallest is the negative of it."""
STOCHASTIC = ("bf16", "int8", "int4")
"""Value codes that can round stochastically."""
WITHOUT_ZERO = ("sign", "two-bit")
"""Value codes in which padding has a value too; a reader makes it zero."""
BLOCK = 256
"""Values that share a scale, or the levels of two-bit."""
LARGEST = 3.4e38
"""A little below the largest fp32 number, so that level x scale cannot round to infinity."""


@dataclass(frozen=True)
class Encoding:
    """The codes of values and indices in a message.

    indices: "auto" takes the smallest code for the size and capacity of the message.
    rounding: "nearest" or "stochastic", for the values. Receivers need not know.
    """

    values: str = "fp32"
    indices: str = "int32"
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        if self.values not in VALUES:
            raise unknown("value encoding", self.values, VALUES)
        if self.indices not in {*INDICES, "auto"}:
            raise unknown("index encoding", self.indices, {*INDICES, "auto"})
        if self.rounding not in ("nearest", "stochastic"):
            raise unknown("rounding", self.rounding, ("nearest", "stochastic"))
        if self.rounding == "stochastic" and self.values not in STOCHASTIC:
            raise ConfigError(
                f"rounding='stochastic' is for values {', '.join(STOCHASTIC)}; got {self.values!r}"
            )

    @property
    def code(self) -> int:
        return VALUES[self.values] | INDICES[self.indices] << 8

    @property
    def plain(self) -> bool:
        """True: `kernels.mean_of_messages` reads this encoding without unpacking it first.

        Its values are fp32 or bf16, and its indices int32 or common.
        """
        return self.values in ("fp32", "bf16") and self.indices in ("int32", "common")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of float values."""
        return FLOATS[self.values]

    def settled(self, size: int, capacity: int) -> "Encoding":
        """Return this encoding with "auto" replaced by the smallest code."""
        if self.indices != "auto":
            return self
        return replace(self, indices=smallest(size, capacity))


def nbytes(capacity: int, encoding: Encoding = Encoding(), size: int = MAX_SIZE) -> int:
    """Return the length of a message with room for `capacity` of `size` entries."""
    encoding = encoding.settled(size, capacity)
    body = index_bytes(encoding.indices, size, capacity) + value_bytes(encoding.values, capacity)
    return -(-(HEADER + body) // 16) * 16


def index_bytes(name: str, size: int, capacity: int) -> int:
    """Return the bytes of `capacity` ascending indices below `size`."""
    if name == "common" or capacity == 0:
        return 0
    if name == "int32":
        return 4 * capacity
    if name == "bitmap":
        return 4 * words_for(size)
    return 4 * sum(word_parts(name, size, capacity))


def word_parts(name: str, size: int, capacity: int) -> tuple[int, int]:
    """Return the number of words in each of the two parts of an index code.

    packed: the low and the high bits. local16: the ends of the blocks and the places in them.
    """
    if name == "local16":
        return -(-size // LOCAL), words_for(16 * capacity)
    low = low_bits(size, capacity)
    return words_for(capacity * low), words_for(capacity + (size >> low) + 1)


def smallest(size: int, capacity: int) -> str:
    """Return the index code of the fewest bytes; never local16, which is larger than packed."""
    return min(("packed", "bitmap", "int32"), key=lambda code: index_bytes(code, size, capacity))


def value_bytes(name: str, capacity: int) -> int:
    """Return the bytes of `capacity` values."""
    if name in FLOATS:
        return capacity * FLOATS[name].itemsize
    codes = -(-capacity // {"int8": 1, "int4": 2, "two-bit": 4, "sign": 8}[name])
    return 4 * -(-capacity // BLOCK) + codes


def low_bits(size: int, capacity: int) -> int:
    """Return the number of low bits of an index that packed stores directly.

    The message is shortest near log2(size / capacity).
    """
    return max(0, (size // max(1, capacity)).bit_length() - 1)


def parts(buffer: Tensor, size: int, capacity: int, encoding: Encoding) -> tuple[Tensor, Tensor]:
    """Return views of the bytes of the indices and of the values."""
    split = HEADER + index_bytes(encoding.indices, size, capacity)
    return buffer[HEADER:split], buffer[split : split + value_bytes(encoding.values, capacity)]


@lru_cache(maxsize=256)
def usable_header(
    size: int, capacity: int, encoding: Encoding, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the words of a usable header, and a mask of the bits to compare.

    The mask leaves out the count, which may have any value.
    """
    words = template_of(size, capacity, encoding, torch.device("cpu"))[:HEADER].view(torch.int32)
    expected, compared = words.clone(), torch.full((HEADER // 4,), -1, dtype=torch.int32)
    expected[4], compared[3] = 1, 0
    return expected.to(device), compared.to(device)


@lru_cache(maxsize=256)
def template_of(size: int, capacity: int, encoding: Encoding, device: torch.device) -> Tensor:
    """Return a message of zeros whose header holds all words that are known beforehand.

    It is made once per size, capacity, encoding and device, so that no step waits for a copy.
    """
    length = nbytes(capacity, encoding, size)
    words = [MAGIC, size, capacity, 0, 0, encoding.code, length, 0]
    out = torch.zeros(length, dtype=torch.uint8)
    out[:HEADER] = torch.tensor(words, dtype=torch.int32).view(torch.uint8)
    return out.to(device)
