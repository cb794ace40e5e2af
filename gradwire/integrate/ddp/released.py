"""The dense average of a model whose wire has left; the hook stays.

DDP reads a hook's answer in the order that the parameters have now, and fills its buckets in the
order that they had when it built them. Without a hook DDP reads in that older order too.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from gradwire.integrate.ddp.order import BucketPart, new_strides
from gradwire.types import Slot

FIRST = 3
"""The first steps, in which DDP may build its buckets anew, at the same addresses."""


@dataclass(eq=False)
class _Place:
    """A parameter's part of a bucket, and the strides with which DDP will read the answer."""

    part: BucketPart
    slot: Slot
    read: tuple[int, ...] = ()


class DenseAverage:
    """The average of whole buckets, in an order that all ranks share."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._process_group = process_group
        self._places: dict[int, tuple[tuple[object, ...], list[_Place]]] = {}
        self._steps = 0

    def __call__(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Return a Future of the averaged bucket."""
        places = self._places_of(bucket)
        for place in places:
            if not place.part.certain:
                place.read = place.part.find_strides(place.slot)
            place.part.move(place.part.filled, place.slot.stride)

        def put_back(future: Future[Tensor]) -> Tensor:
            for place in places:
                place.part.move(place.slot.stride, place.read)
            return future.value()

        return allreduce_hook(self._process_group, bucket).then(put_back)

    def _places_of(self, bucket: dist.GradBucket) -> list[_Place]:
        buffer, parameters = bucket.buffer(), bucket.parameters()
        if bucket.index() == 0:
            self._steps += 1
            if self._steps <= FIRST:
                self._places = {}
        key = buffer.data_ptr(), *((id(p), p.stride()) for p in parameters)
        known, places = self._places.get(bucket.index(), ((), []))
        if known != key:
            places = [
                _Place(BucketPart(name, part, parameter), _slot_of(parameter, name))
                for name, part, parameter in zip(
                    map(str, range(len(parameters))),
                    buffer.split([p.numel() for p in parameters]),
                    parameters,
                    strict=True,
                )
            ]
            self._places[bucket.index()] = key, places
        return places


def _slot_of(parameter: Tensor, name: str) -> Slot:
    shape = tuple(parameter.shape)
    return Slot(name, shape, new_strides(shape), parameter.dtype, numel=parameter.numel())
