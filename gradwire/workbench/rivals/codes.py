"""Codes of the rivals: statistical bins of 2 or 4 bits, 4-bit floats, and the largest of a chunk.

A code is made of the numbers that travel, and what is delivered is read from these alone.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gradwire.workbench.rivals.chunks import SIDE, Chunks, index_bits

SIGMAS = 6
"""The deviations that the bins of the statistical code span."""


@dataclass(frozen=True)
class Coded:
    """A parameter of all workers as it arrives.

    values: [workers, entries]. sent: True where a worker sent an entry; None for everywhere.
    bits: the size of one worker's message.
    """

    values: Tensor
    sent: Tensor | None
    bits: int


class Code(Protocol):
    """A way to encode a parameter [workers, *shape] of all workers."""

    def __call__(self, parameter: Tensor) -> Coded: ...


def bin_statistically(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the bins [..., n] of rows, and the mean of every bin [..., 2^bits].

    Bins are 6 deviations / 2^bits wide around the mean of a row. MuLoCo and SparseLoCo do so.
    """
    bins = 2**bits
    shift = rows.mean(-1, keepdim=True)
    centred = rows - shift
    # The unbiased deviation; a row of one entry has none.
    deviation = centred.norm(dim=-1, keepdim=True) / max(rows.shape[-1] - 1, 1) ** 0.5
    width = SIGMAS * deviation / bins
    width = torch.where(width > 0, width, 1)
    numbers = (centred / width + bins // 2).round().clamp(0, bins - 1).nan_to_num(0)
    means = []
    for number in range(bins):
        inside = numbers == number
        total = torch.where(inside, centred, 0).sum(-1)
        means.append(total / inside.sum(-1).clamp(min=1))
    return numbers.to(torch.uint8), torch.stack(means, -1) + shift


def read_bins(numbers: Tensor, means: Tensor) -> Tensor:
    """Return the values of bins."""
    return means.gather(-1, numbers.long())


@dataclass(frozen=True)
class RowBins:
    """MuLoCo's code: statistical bins for every row of a matrix; vectors go whole in fp32.

    The means of bins travel as bf16, 2^bits of them for a row.
    """

    bits: int

    def __call__(self, parameter: Tensor) -> Coded:
        if parameter.dim() < 3:
            return Coded(parameter.flatten(1), None, 32 * parameter[0].numel())
        rows = parameter.flatten(2)
        numbers, means = bin_statistically(rows, self.bits)
        means = means.bfloat16().to(rows.dtype)
        size = self.bits * numbers[0].numel() + 16 * means[0].numel()
        return Coded(read_bins(numbers, means).flatten(1), None, size)


@dataclass(frozen=True)
class ChunkBins:
    """SparseLoCo's code: the `keep` largest entries of every 64 x 64 chunk, in 2-bit bins.

    An index takes 12 bits. The four means are of a parameter's sent entries together, in fp32.
    """

    keep: int = 64
    bits: int = 2

    def __call__(self, parameter: Tensor) -> Coded:
        workers = len(parameter)
        chunks = Chunks([tuple(parameter.shape[1:])], SIDE)
        ((size, cut),) = chunks.cut(parameter.flatten(1)).items()
        cut = cut.flatten(-2)
        keep = min(self.keep, cut.shape[-1])
        indices = cut.abs().topk(keep, dim=-1, sorted=False).indices
        largest = cut.gather(-1, indices)
        numbers, means = bin_statistically(largest.flatten(1), self.bits)
        values = read_bins(numbers, means).view_as(largest)
        sent = torch.zeros_like(cut).scatter_(-1, indices, values)
        chosen = torch.zeros_like(cut).scatter_(-1, indices, 1.0)
        each = index_bits(cut.shape[-1]) + self.bits
        message = numbers[0].numel() * each + 32 * means[0].numel()
        joined = [chunks.join({size: part.unflatten(-1, size)}) for part in (sent, chosen)]
        return Coded(joined[0].view(workers, -1), joined[1].view(workers, -1) > 0, message)


_TOP = 4
"""The exponent of the largest 4-bit float, 16; the smallest is 2^-2, and 0 is one of them."""


@dataclass(frozen=True)
class FourBitFloats:
    """Streaming DiLoCo's code E3M0: a sign, and 3 bits for 0 or one of seven powers of two.

    A scale in fp32 puts a parameter's largest entry on the largest power.
    """

    def __call__(self, parameter: Tensor) -> Coded:
        flat = parameter.flatten(1)
        scale = flat.abs().amax(1, keepdim=True) / 2**_TOP
        scaled = flat / torch.where(scale > 0, scale, 1)
        size = scaled.abs()
        # The nearest power of two of x is 2^e for 0.75 x 2^e <= x < 1.5 x 2^e.
        exponent = torch.frexp(size / 0.75).exponent - 1
        # 1 to 7, and 0 for zero, which is nearer below half of the smallest power.
        number = (exponent + 7 - _TOP).clamp(1, 7)
        number = torch.where(size < 2.0 ** (_TOP - 7), 0, number)
        power = torch.ldexp(torch.ones_like(size), number + (_TOP - 7))
        value = torch.where(number > 0, power, 0) * torch.sign(scaled)
        return Coded(value * scale, None, 4 * flat.shape[1] + 32)
