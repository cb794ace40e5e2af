"""The order of a parameter's entries in DDP's buckets, and models that DDP has lost.

DDP fills a bucket in the order that the parameters had when DDP built the bucket. DDP builds
buckets when it is constructed, and again before the second step. DDP reads the hook's answer in the
order that the parameters have now. The two orders differ after
`ddp.to(memory_format=torch.channels_last)`, and torch does not report the change. The first order
is therefore found by comparing a bucket with the gradients that DDP copied into it.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from gradwire.accumulate.layout import is_packed
from gradwire.errors import AttachError
from gradwire.types import Slot

_Stride = tuple[int, ...]

_WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
"""The integers of the same width, as which bits are compared."""


def stride_of(parameter: Tensor) -> _Stride:
    """Return the strides that a parameter would have in a bucket that DDP builds now."""
    shape, stride = tuple(parameter.shape), parameter.stride()
    # DDP closes the gaps of a parameter that is a view of a larger tensor.
    return stride if is_packed(shape, stride) else new_strides(shape)


@dataclass(eq=False)
class BucketPart:
    """The part of a bucket that belongs to one parameter."""

    name: str
    part: Tensor
    parameter: Tensor
    filled: _Stride = ()
    """The strides with which DDP fills the part."""
    certain: bool = False
    """True: a comparison with a gradient has shown `filled`; False: `filled` is a guess."""

    def find_strides(self, slot: Slot) -> _Stride:
        """Find the strides with which DDP filled the part; return those of reading the answer."""
        grad, now = self.parameter.grad, stride_of(self.parameter)
        if sum(n > 1 for n in slot.shape) < 2:
            # With one dimension only, there is only one order.
            self.filled, self.certain = slot.stride, True
            return slot.stride
        if grad is None:
            # DDP filled the part with zeros, which tell nothing about the order.
            self.filled = now
            return now
        if grad.untyped_storage().data_ptr() == self.part.untyped_storage().data_ptr():
            # With gradient_as_bucket_view DDP copies nothing, so both orders are the gradient's.
            self.filled, self.certain = grad.stride(), True
            return self.filled
        fits = [s for s in _candidates(now, slot) if _has_same_bits(self._view(s), grad)]
        if not fits and not self.part.any():
            # Inside Join a rank without data takes part with zeros, and reads no answer.
            self.filled = slot.stride
            return slot.stride
        if not fits:
            raise AttachError(
                f"DDP's bucket does not hold the gradient of {self.name!r}, or in an order that "
                "is no memory format of torch: convert the model before DistributedDataParallel"
            )
        self.filled, self.certain = fits[0], len(fits) == 1
        return now

    def reorder(self, stride: _Stride) -> None:
        """Put the gradient into the order of these strides, in place."""
        self.move(self.filled, stride)

    def move(self, old: _Stride, new: _Stride) -> None:
        """Move the entries from where the old strides put them to where the new ones do."""
        if not _is_same_order(old, new, self.parameter.shape):
            self._view(new).copy_(self._view(old).clone())

    def _view(self, stride: _Stride) -> Tensor:
        return self.part.as_strided(self.parameter.shape, stride)


def _candidates(now: _Stride, slot: Slot) -> Iterator[_Stride]:
    """Yield the strides to try, the likeliest first, and each order of entries only once."""
    formats = [torch.contiguous_format]
    formats += {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(len(slot.shape), [])
    seen: list[_Stride] = []
    for stride in (now, slot.stride, *(new_strides(slot.shape, each) for each in formats)):
        if not any(_is_same_order(stride, other, slot.shape) for other in seen):
            seen.append(stride)
            yield stride


def _is_same_order(first: _Stride, second: _Stride, shape: Sequence[int]) -> bool:
    """Return True for equal strides, except in dimensions of length 1, where strides are unused."""
    return all(a == b for a, b, n in zip(first, second, shape, strict=True) if n > 1)


def _has_same_bits(first: Tensor, second: Tensor) -> bool:
    """Return True for the same bits, so that NaN equals NaN."""
    words = _WORDS[first.dtype]
    return torch.equal(first.view(words), second.view(words))


def new_strides(
    shape: Sequence[int], format: torch.memory_format = torch.contiguous_format
) -> _Stride:
    """Return the strides of a new tensor."""
    return torch.empty(shape, dtype=torch.int8, device="meta", memory_format=format).stride()


class Accumulator:
    """A watch on the node of autograd on which DDP's hook of one parameter sits.

    `model.to(dtype)` and `model.to(device)` give every parameter a new node, also if the model
    comes back to the old dtype. DDP's hooks stay on the old nodes, and DDP averages nothing any
    more, without a word. In a backward pass with a new node the watch calls `lost`.
    """

    def __init__(self, parameter: Tensor, lost: Callable[[], None]) -> None:
        node = get_gradient_edge(parameter).node
        method = weakref.WeakMethod(lost)

        # DDP keeps the node, and the hook must not keep the engine.
        def check(parameter: Tensor) -> None:
            call = method()
            if call is not None and get_gradient_edge(parameter).node is not node:
                call()

        self._handle = parameter.register_post_accumulate_grad_hook(check)

    def remove(self) -> None:
        """Stop watching."""
        self._handle.remove()
