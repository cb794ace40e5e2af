"""The wire format, version 1: a header of eight little-endian int32 words, indices, values.

    word 0  magic and version      "GRW" and 1
    word 1  size                   entries of the bundle, padding slots included
    word 2  capacity               entries this message has room for
    word 3  count                  entries that are real
    word 4  finite                 1 when every gradient entry of the sender was finite
    word 5  encoding               values code | indices code << 8
    word 6  length                 bytes of the whole message
    word 7  reserved               0

then `capacity` int32 indices (none with indices code 1: every rank knows them), then `capacity`
values, then zeros up to a multiple of 16. A message of capacity 0 says only whether its sender was
finite; the dense exchange sends no other.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from gradwire.errors import MessageError, unknown
from gradwire.kernels import pack
from gradwire.types import MAX_SIZE, Sparse

MAGIC = int.from_bytes(b"GRW\x01", "little")
HEADER = 32
VALUES = {"fp32": (0, torch.float32), "bf16": (1, torch.bfloat16)}
INDICES = {"int32": (0, 4), "common": (1, 0)}


@dataclass(frozen=True)
class Encoding:
    """How values and indices travel; `common` indices are known to every rank and do not."""

    values: str = "fp32"
    indices: str = "int32"

    def __post_init__(self) -> None:
        if self.values not in VALUES:
            raise unknown("value encoding", self.values, VALUES)
        if self.indices not in INDICES:
            raise unknown("index encoding", self.indices, INDICES)

    @property
    def code(self) -> int:
        return VALUES[self.values][0] | INDICES[self.indices][0] << 8

    @property
    def dtype(self) -> torch.dtype:
        return VALUES[self.values][1]

    @property
    def index_bytes(self) -> int:
        return INDICES[self.indices][1]


@dataclass(frozen=True)
class Message:
    """What one rank sends: the buffer, and for this rank's own use what is in it.

    `sparse` None: no entries travel in the buffer, it only says whether its sender was finite.
    """

    buffer: Tensor
    sparse: Sparse | None
    encoding: Encoding

    @property
    def finite(self) -> Tensor:
        """The header's word: 1 or 0, on the device."""
        return self.buffer[:HEADER].view(torch.int32)[4]

    @property
    def chosen(self) -> Sparse:
        """What the sender chose; raises for a message without entries."""
        if self.sparse is None:
            raise ValueError("a message without entries has nothing to unpack")
        return self.sparse

    @property
    def delivered(self) -> Sparse:
        """What receivers see of it: the values as they travel."""
        mine = self.chosen
        if self.encoding.dtype == mine.values.dtype:
            return mine
        _, values = _body(self.buffer, mine.capacity, self.encoding)
        return replace(mine, values=values.float())

    @property
    def index_part(self) -> Tensor:
        """The header and the indices, for exchanges that first agree on these."""
        return self.buffer[: HEADER + self.chosen.capacity * self.encoding.index_bytes]

    def unpack_indices(self, part: Tensor) -> tuple[Tensor, Tensor]:
        """The indices in another rank's `index_part`, and whether it may be used (0-d bool)."""
        mine = self.chosen
        usable = self._usable(part)
        if not self.encoding.index_bytes:
            return mine.indices, usable
        indices = part[HEADER:].view(torch.int32)
        inside = (indices >= 0) & (indices < mine.size)
        return torch.where(inside, indices, mine.size), usable

    def _usable(self, buffer: Tensor) -> Tensor:
        """Whether a header says that its sender was finite and sent a message like this one."""
        mine = self.chosen
        expected = _template(mine.size, mine.capacity, self.encoding, buffer.device)[:HEADER]
        words = buffer[:HEADER].view(torch.int32)
        same = words == expected.view(torch.int32)
        return same[:3].all() & same[5:].all() & (words[4] == 1)

    def unpack(self, buffer: Tensor) -> tuple[Sparse, Tensor]:
        """What another rank's `buffer` delivers, and whether it may be used (0-d bool); no sync.

        Every rank's message has the size, capacity and encoding of this one, and its indices where
        they are common. One that says otherwise may not be used; an index that points outside is
        turned into padding before it can touch memory.
        """
        mine = self.chosen
        usable = self._usable(buffer)
        indices, values = _body(buffer, mine.capacity, self.encoding)
        if indices is None:
            indices = mine.indices
        inside = (indices >= 0) & (indices < mine.size)
        values = torch.where(inside, values.float(), 0)
        indices = torch.where(inside, indices, mine.size)
        count = buffer[:HEADER].view(torch.int32)[3]
        return Sparse(indices, values, count, mine.size, mine.common), usable


def nbytes(capacity: int, encoding: Encoding = Encoding()) -> int:
    """The length of a message with room for `capacity` entries."""
    body = capacity * (encoding.index_bytes + encoding.dtype.itemsize)
    return -(-(HEADER + body) // 16) * 16


def encode(
    sparse: Sparse | None, finite: Tensor, encoding: Encoding = Encoding(), size: int = 0
) -> Message:
    """The message: one uint8 buffer on the device of `finite`; no host sync.

    What the rounding of values takes away is not in the buffer: subtract `delivered` from u, not
    `sparse`, and it stays. `size` is only needed without entries.

        sparse = gradwire.compress(u, k=100)
        message = encode(sparse, torch.tensor(True), Encoding(values="bf16"))
    """
    if sparse is None:
        buffer = _template(size, 0, encoding, finite.device).clone()
        buffer[:HEADER].view(torch.int32)[4] = finite
        return Message(buffer, None, encoding)
    if sparse.common:
        encoding = replace(encoding, indices="common")
    template = _template(sparse.size, sparse.capacity, encoding, finite.device)
    # Above its largest number bf16 rounds to infinity; clamped, the rest stays with the sender.
    indices = None if sparse.common else sparse.indices
    buffer = pack(template, indices, sparse.values, sparse.count, finite, encoding.dtype)
    return Message(buffer, sparse, encoding)


def decode(buffer: Tensor, common: Tensor | None = None) -> tuple[Sparse, bool]:
    """The entries of `buffer` and whether their sender was finite, every byte of it checked.

    For messages from anywhere: lengths, counts, order and range are checked before anything is
    used, and each failure says what is wrong. Asks the host. `common` are the indices of a message
    that carries none.
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
    if length != nbytes(capacity, encoding) or length != buffer.numel():
        raise MessageError(
            f"{buffer.numel()} bytes for a message of {nbytes(capacity, encoding)} that says "
            f"{length}: truncated or padded"
        )
    if finite not in (0, 1) or reserved != 0:
        raise MessageError(
            f"finite flag {finite} and reserved word {reserved} must be 0 or 1, and 0"
        )
    indices, values = _body(buffer, capacity, encoding)
    if indices is None:
        if common is None or common.numel() != capacity:
            raise MessageError(f"the message carries no indices: pass the {capacity} common ones")
        indices = common
    _check_entries(indices, values, count, size)
    counted = torch.tensor(count, dtype=torch.int32, device=buffer.device)
    common_indices = encoding.indices == "common"
    return Sparse(indices, values.float(), counted, size, common_indices), bool(finite)


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
    found = (magic % 2**32).to_bytes(4, "little")
    if found[:3] == b"GRW":
        return (
            f"message of wire version {found[3]}, this is version 1: run one gradwire on all ranks"
        )
    return f"not a gradwire message: it begins with {found!r}, not b'GRW'"


def _encoding(code: int) -> Encoding:
    values = [name for name, (c, _) in VALUES.items() if c == code & 0xFF]
    indices = [name for name, (c, _) in INDICES.items() if c == code >> 8]
    if not values or not indices:
        raise MessageError(f"unknown encoding {code:#x}")
    return Encoding(values[0], indices[0])


def _body(buffer: Tensor, capacity: int, encoding: Encoding) -> tuple[Tensor | None, Tensor]:
    """Views of the indices (None where they are common) and of the values."""
    split = HEADER + capacity * encoding.index_bytes
    end = split + capacity * encoding.dtype.itemsize
    indices = buffer[HEADER:split].view(torch.int32) if encoding.index_bytes else None
    return indices, buffer[split:end].view(encoding.dtype)


@lru_cache(maxsize=256)
def _template(size: int, capacity: int, encoding: Encoding, device: torch.device) -> Tensor:
    """A message of zeros with the words that are known beforehand; made once, so no copy waits."""
    length = nbytes(capacity, encoding)
    words = [MAGIC, size, capacity, 0, 0, encoding.code, length, 0]
    out = torch.zeros(length, dtype=torch.uint8)
    out[:HEADER] = torch.tensor(words, dtype=torch.int32).view(torch.uint8)
    return out.to(device)
