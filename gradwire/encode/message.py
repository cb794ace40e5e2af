"""A message: what one rank sends, and what it reads in the messages of others."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradwire.encode.format import HEADER, Encoding, index_bytes, template_of, usable_header
from gradwire.encode.noise import Noise
from gradwire.encode.unpack import unpack
from gradwire.encode.write import write_message
from gradwire.types import Sparse


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
        expected, compared = usable_header(mine.size, mine.capacity, self.encoding, buffers.device)
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
        buffer = template_of(size, 0, encoding, finite.device).clone()
        buffer[:HEADER].view(torch.int32)[4] = finite
        return Message(buffer, None, encoding)
    encoding = encoding.settled(sparse.size, sparse.capacity)
    if sparse.common:
        encoding = replace(encoding, indices="common")
    if (noise is None) == (encoding.rounding == "stochastic"):
        raise ValueError(
            f"rounding {encoding.rounding!r} with noise {noise!r}: one needs the other"
        )
    template = template_of(sparse.size, sparse.capacity, encoding, finite.device)
    buffer, seen = write_message(template, sparse, finite, encoding, noise)
    return Message(buffer, sparse, encoding, seen, noise)
