"""A message: the bytes that one rank sends, and the entries in the messages of other ranks."""

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
    """The buffer that one rank sends, and the entries in it for this rank's own use.

    sparse: the chosen entries. None if the buffer only says if its sender was finite.
    seen: the values as receivers see them. None if these are the chosen values.
    noise: the random bits that rounded the values.
    """

    buffer: Tensor
    sparse: Sparse | None
    encoding: Encoding
    seen: Tensor | None = None
    noise: Noise | None = None

    @property
    def finite(self) -> Tensor:
        """Word 4 of the header on the device: 1 if the sender was finite, else 0."""
        return self.buffer[:HEADER].view(torch.int32)[4]

    @property
    def chosen(self) -> Sparse:
        """The entries that the sender chose. Raise ValueError for a message without entries."""
        if self.sparse is None:
            raise ValueError("a message without entries has nothing to unpack")
        return self.sparse

    @property
    def delivered(self) -> Sparse:
        """The entries as receivers see them: the chosen indices, the values as they travel."""
        chosen = self.chosen
        return chosen if self.seen is None else replace(chosen, values=self.seen)

    @property
    def index_part(self) -> Tensor:
        """The header and the indices, for exchanges that agree on indices first."""
        chosen = self.chosen
        return self.buffer[
            : HEADER + index_bytes(self.encoding.indices, chosen.size, chosen.capacity)
        ]

    def unpack_indices(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices in the `index_part` of every rank, one part after the other.

        Return also True (0-d bool) if all parts may be used. Common indices are returned only once.
        parts: uint8 [ranks, bytes].
        """
        chosen = self.chosen
        usable = self._usable(parts)
        if self.encoding.indices == "common":
            return chosen.indices, usable
        rows = unpack(parts, chosen.size, chosen.capacity, self.encoding, bare=True)
        return rows[:, HEADER : HEADER + 4 * chosen.capacity].view(torch.int32).flatten(), usable

    def _usable(self, buffers: Tensor) -> Tensor:
        """Return True if each sender was finite and sent a message of this message's shape."""
        chosen = self.chosen
        expected, compared = usable_header(
            chosen.size, chosen.capacity, self.encoding, buffers.device
        )
        words = buffers[..., :HEADER].view(torch.int32)
        return (((words ^ expected) & compared) == 0).all()

    def unpack(self, buffer: Tensor) -> tuple[Sparse, Tensor]:
        """Return the entries in the `buffer` of another rank, and True (0-d) if they may be used.

        Nothing waits for the host.
        """
        (sparse,), usable = self.unpack_all(buffer.unsqueeze(0))
        return sparse, usable

    def unpack_all(self, buffers: Tensor) -> tuple[list[Sparse], Tensor]:
        """Return the entries in each row of uint8 [ranks, bytes], and a usable flag (0-d bool).

        The flag is True if every sender was finite and every row has the size, capacity and
        encoding of this message. Common indices are those of this message. An index outside the
        vector becomes padding before it can touch memory.
        """
        chosen, k = self.chosen, self.chosen.capacity
        rows = unpack(buffers, chosen.size, k, self.encoding).view(torch.int32)
        counts, words = rows[:, 3], rows[:, HEADER // 4 :]
        if self.encoding.indices == "common":
            indices = chosen.indices.expand(len(rows), -1)
            values = words[:, :k].view(torch.float32)
            values = torch.where(indices < chosen.size, values, 0)
        else:
            indices, values = words[:, :k], words[:, k : 2 * k].view(torch.float32)
        each = zip(indices.unbind(), values.unbind(), counts.unbind(), strict=True)
        sparse = [Sparse(i, v, count, chosen.size, chosen.common) for i, v, count in each]
        return sparse, self._usable(buffers)


def encode(
    sparse: Sparse | None,
    finite: Tensor,
    encoding: Encoding = Encoding(),
    size: int = 0,
    noise: Noise | None = None,
) -> Message:
    """Return the message of the chosen entries, on the device of `finite`; no host sync.

    Rounding takes away a part of each value. Subtract `Message.delivered` from u, not `sparse`.
    Then that part stays in the residual.
    size: needed only without entries. noise: needed for stochastic rounding.

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
