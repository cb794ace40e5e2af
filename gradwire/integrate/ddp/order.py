"""In which order DDP's buckets hold a parameter's entries, where the memory format has changed.

DDP fills a bucket in the order that its parameters had when it built it: when it was constructed,
and once more before the second step. What the hook answers it reads in the order that they have
now. The two differ after `ddp.to(memory_format=torch.channels_last)`, of which torch tells nobody:
the first is found out by comparing a bucket with the gradients that DDP copied into it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.accumulate.layout import is_packed
from gradwire.errors import AttachError
from gradwire.types import Slot

Stride = tuple[int, ...]

_WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def stride_of(parameter: Tensor) -> Stride:
    """The strides with which DDP would lay a parameter out in a bucket that it builds now."""
    shape, stride = tuple(parameter.shape), parameter.stride()
    # As DDP does: a part of something larger lies in its buckets without the gaps.
    return stride if is_packed(shape, stride) else _strides(shape)


@dataclass(eq=False)
class Part:
    """A parameter's part of a bucket."""

    name: str
    part: Tensor
    parameter: Tensor
    came: Stride = ()
    """The strides with which DDP fills it."""
    certain: bool = False
    """Whether it has been seen, and not only guessed, that these are its strides."""

    def look(self, slot: Slot) -> Stride:
        """The strides with which DDP will read the answer; finds out how it filled the part."""
        grad, now = self.parameter.grad, stride_of(self.parameter)
        if sum(n > 1 for n in slot.shape) < 2:
            self.came, self.certain = slot.stride, True
            return slot.stride
        if grad is None:
            self.came = now  # DDP filled it with zeros
            return now
        if grad.untyped_storage().data_ptr() == self.part.untyped_storage().data_ptr():
            # gradient_as_bucket_view: nothing is read back.
            self.came, self.certain = grad.stride(), True
            return self.came
        fits = [s for s in _orders(now, slot) if _is_same(self._view(s), grad)]
        if not fits and not self.part.any():
            # Join: a rank without data left takes part with zeros, and reads no answer.
            self.came = slot.stride
            return slot.stride
        if not fits:
            raise AttachError(
                f"DDP's bucket does not hold the gradient of {self.name!r}, or in an order that "
                "is no memory format of torch: convert the model before DistributedDataParallel"
            )
        self.came, self.certain = fits[0], len(fits) == 1
        return now

    def turn(self, stride: Stride) -> None:
        """Put the gradient into the order of these strides, in place."""
        if not _is_alike(self.came, stride, self.parameter.shape):
            self._view(stride).copy_(self._view(self.came).clone())

    def _view(self, stride: Stride) -> Tensor:
        return self.part.as_strided(self.parameter.shape, stride)


def _orders(now: Stride, slot: Slot) -> Iterator[Stride]:
    """Those to try, the likeliest first; orders that are the same for this shape only once."""
    formats = [torch.contiguous_format]
    formats += {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(len(slot.shape), [])
    seen: list[Stride] = []
    for stride in (now, slot.stride, *(_strides(slot.shape, each) for each in formats)):
        if not any(_is_alike(stride, other, slot.shape) for other in seen):
            seen.append(stride)
            yield stride


def _is_alike(one: Stride, other: Stride, shape: Sequence[int]) -> bool:
    """Whether they are one order: the stride of a dimension of one entry tells nothing."""
    return all(a == b for a, b, n in zip(one, other, shape, strict=True) if n > 1)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether they have the same bits; NaN is like itself."""
    words = _WORDS[one.dtype]
    return torch.equal(one.view(words), other.view(words))


def _strides(shape: Sequence[int], format: torch.memory_format = torch.contiguous_format) -> Stride:
    return torch.empty(shape, dtype=torch.int8, device="meta", memory_format=format).stride()
