"""The wire format, version 1: a header of eight little-endian int32 words, indices, values.

    word 0  magic and version      "GRW" and 1
    word 1  size                   entries of the bundle, padding slots included
    word 2  capacity               entries this message has room for
    word 3  count                  entries that are real
    word 4  finite                 1 when every gradient entry of the sender was finite
    word 5  encoding               values code | indices code << 8
    word 6  length                 bytes of the whole message
    word 7  reserved               0

then the indices (see `indices`), then the values (see `values`), then zeros up to a multiple of 16.
A message of capacity 0 says only whether its sender was finite.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from gradwire.encode.indices import INDICES, index_bytes, smallest
from gradwire.encode.noise import Noise
from gradwire.encode.values import FLOATS, STOCHASTIC, VALUES, value_bytes
from gradwire.errors import ConfigError, unknown
from gradwire.kernels import pack, unpack
from gradwire.types import MAX_SIZE, Sparse

MAGIC = int.from_bytes(b"GRW\x01", "little")
HEADER = 32


@dataclass(frozen=True)
class Encoding:
    """How values and indices travel; `auto` indices are the smallest code for the sizes at hand.

    `rounding` of values is "nearest" or "stochastic"; receivers need not know.
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
        """Whether `kernels.decode` reads it as it is: fp32 or bf16 values, int32 or no indices."""
        return self.values in ("fp32", "bf16") and self.indices in ("int32", "common")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of float values."""
        return FLOATS[self.values]

    def settled(self, size: int, capacity: int) -> "Encoding":
        """With `auto` replaced by the smallest code."""
        if self.indices != "auto":
            return self
        return replace(self, indices=smallest(size, capacity))


@dataclass(frozen=True)
class Message:
    """What one rank sends: the buffer, and for this rank's own use what is in it.

    `sparse` None: no entries travel in the buffer, it only says whether its sender was finite.
    `seen`: the values as receivers see them. `noise`: what they were rounded with.
    """

    buffer: Tensor
    sparse: Sparse | None
    encoding: Encoding
    seen: Tensor | None = None
    noise: Noise | None = None

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
        return mine if self.seen is None else replace(mine, values=self.seen)

    @property
    def index_part(self) -> Tensor:
        """The header and the indices, for exchanges that first agree on these."""
        mine = self.chosen
        return self.buffer[: HEADER + index_bytes(self.encoding.indices, mine.size, mine.capacity)]

    def unpack_indices(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        """The indices in all ranks' `index_part`s, one after the other, and whether to use them.

        parts: uint8 [ranks, bytes]. Common indices are there once.
        """
        mine = self.chosen
        usable = self._usable(parts)
        if self.encoding.indices == "common":
            return mine.indices, usable
        rows = unpack(parts, mine.size, mine.capacity, self.encoding, bare=True)
        return rows[:, HEADER : HEADER + 4 * mine.capacity].view(torch.int32).flatten(), usable

    def _usable(self, buffers: Tensor) -> Tensor:
        """Whether every header says that its sender was finite and sent a message like this one."""
        mine = self.chosen
        expected, compared = _header(mine.size, mine.capacity, self.encoding, buffers.device)
        words = buffers[..., :HEADER].view(torch.int32)
        return (((words ^ expected) & compared) == 0).all()

    def unpack(self, buffer: Tensor) -> tuple[Sparse, Tensor]:
        """What another rank's `buffer` delivers, and whether it may be used (0-d bool); no sync."""
        (sparse,), usable = self.unpack_all(buffer.unsqueeze(0))
        return sparse, usable

    def unpack_all(self, buffers: Tensor) -> tuple[list[Sparse], Tensor]:
        """What each of the rows of uint8 [ranks, bytes] delivers, and whether all may be used.

        Every rank's message has the size, capacity and encoding of this one, and its indices where
        they are common. One that says otherwise may not be used; an index that points outside is
        turned into padding before it can touch memory.
        """
        mine, k = self.chosen, self.chosen.capacity
        rows = unpack(buffers, mine.size, k, self.encoding).view(torch.int32)
        counts, words = rows[:, 3], rows[:, HEADER // 4 :]
        if self.encoding.indices == "common":
            indices, values = mine.indices.expand(len(rows), -1), words[:, :k].view(torch.float32)
            values = torch.where(indices < mine.size, values, 0)
        else:
            indices, values = words[:, :k], words[:, k : 2 * k].view(torch.float32)
        each = zip(indices.unbind(), values.unbind(), counts.unbind(), strict=True)
        sparse = [Sparse(i, v, count, mine.size, mine.common) for i, v, count in each]
        return sparse, self._usable(buffers)


def nbytes(capacity: int, encoding: Encoding = Encoding(), size: int = MAX_SIZE) -> int:
    """The length of a message with room for `capacity` of `size` entries."""
    encoding = encoding.settled(size, capacity)
    body = index_bytes(encoding.indices, size, capacity) + value_bytes(encoding.values, capacity)
    return -(-(HEADER + body) // 16) * 16


def encode(
    sparse: Sparse | None,
    finite: Tensor,
    encoding: Encoding = Encoding(),
    size: int = 0,
    noise: Noise | None = None,
) -> Message:
    """The message: one uint8 buffer on the device of `finite`; no host sync.

    What the rounding of values takes away is not in the buffer: subtract `delivered` from u, not
    `sparse`, and it stays. `size` is only needed without entries, `noise` for stochastic rounding.

        sparse = gradwire.compress(u, k=100)
        message = encode(sparse, torch.tensor(True), Encoding(values="bf16"))
    """
    if sparse is None:
        encoding = encoding.settled(size, 0)
        buffer = _template(size, 0, encoding, finite.device).clone()
        buffer[:HEADER].view(torch.int32)[4] = finite
        return Message(buffer, None, encoding)
    encoding = encoding.settled(sparse.size, sparse.capacity)
    if sparse.common:
        encoding = replace(encoding, indices="common")
    if (noise is None) == (encoding.rounding == "stochastic"):
        raise ValueError(
            f"rounding {encoding.rounding!r} with noise {noise!r}: one needs the other"
        )
    template = _template(sparse.size, sparse.capacity, encoding, finite.device)
    buffer, seen = pack(template, sparse, finite, encoding, noise)
    return Message(buffer, sparse, encoding, seen, noise)


def parts(buffer: Tensor, size: int, capacity: int, encoding: Encoding) -> tuple[Tensor, Tensor]:
    """Views of the bytes of the indices and of the values."""
    split = HEADER + index_bytes(encoding.indices, size, capacity)
    return buffer[HEADER:split], buffer[split : split + value_bytes(encoding.values, capacity)]


@lru_cache(maxsize=256)
def _header(
    size: int, capacity: int, encoding: Encoding, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The words of a usable header, and a mask without the count, which may be any."""
    words = _template(size, capacity, encoding, torch.device("cpu"))[:HEADER].view(torch.int32)
    expected, compared = words.clone(), torch.full((HEADER // 4,), -1, dtype=torch.int32)
    expected[4], compared[3] = 1, 0
    return expected.to(device), compared.to(device)


@lru_cache(maxsize=256)
def _template(size: int, capacity: int, encoding: Encoding, device: torch.device) -> Tensor:
    """A message of zeros with the words that are known beforehand; made once, so no copy waits."""
    length = nbytes(capacity, encoding, size)
    words = [MAGIC, size, capacity, 0, 0, encoding.code, length, 0]
    out = torch.zeros(length, dtype=torch.uint8)
    out[:HEADER] = torch.tensor(words, dtype=torch.int32).view(torch.uint8)
    return out.to(device)
