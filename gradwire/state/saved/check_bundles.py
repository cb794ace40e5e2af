"""Checks of the bundles of a saved state: their parameters, memories and deliveries."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.accumulate.layout import assign_offsets, is_dense, is_packed, size_of
from gradwire.accumulate.owned import OWNED, part_length
from gradwire.errors import StateError
from gradwire.state.saved.check import (
    FLOAT,
    LARGEST,
    MOST,
    check_size,
    is_count,
    is_list_of,
    is_tensor,
    kind_of,
    shown,
)
from gradwire.types import Slot

_WHOLE = (torch.int32, torch.int64)
_LEVEL = (torch.float32, 0, 0.0, LARGEST)
_COUNT = (torch.int64, 0, 0, MOST)
MEMORIES: dict[str, tuple[torch.dtype, int, float, float]] = {
    "threshold": _LEVEL,
    "theta": _LEVEL,
    "oktopk.threshold": _LEVEL,
    "ratios": _LEVEL,
    "pace": (torch.float32, 0, -LARGEST, LARGEST),
    "draws": _COUNT,
    "step": _COUNT,
    "calls": _COUNT,
    "roundings": _COUNT,
    "oktopk.steps": _COUNT,
    "sketch.steps": _COUNT,
    "stages": (torch.int64, 0, 1, 6),
    "counts": (torch.int64, 1, 0, MOST),
    "starts": (torch.int64, 1, 0, MOST),
    "oktopk.regions": (torch.int32, 2, 0, 2**31),
    "owner.steps": _COUNT,
    OWNED: (torch.float32, 1, -LARGEST, LARGEST),
}
"""What methods and exchanges remember: dtype, dimensions, least and largest value."""
_PLACES = ("counts", "starts", "oktopk.regions")
"""Memories that count or name entries of their bundle, so none is larger than the bundle."""
ALIKE = (
    *("draws", "step", "counts", "starts", "roundings", "owner.steps", "sketch.steps"),
    *("oktopk.steps", "oktopk.threshold", "oktopk.regions"),
)
"""Memories that all ranks have alike. With others they would send each other different entries."""


def check_bundles(
    saved: Mapping[str, Any], slots: Mapping[str, Slot], dense: Sequence[str]
) -> None:
    """Raise StateError unless this model could have the bundles of a saved state.

    Each parameter must be in one bundle, beside parameters of its dtype and density. Memories and
    deliveries must fit their bundle.
    """
    bundles = saved["bundles"]
    if not _is_lists_of_names(bundles) or sorted(n for b in bundles for n in b) != sorted(slots):
        raise StateError("the bundles of the state do not hold each parameter once")
    for name in ("memory", "delivered"):
        if not isinstance(saved[name], list) or len(saved[name]) != len(bundles):
            raise StateError(f"the state has another number of bundles than of entries of {name!r}")
    for names, memory, sent in zip(bundles, saved["memory"], saved["delivered"], strict=True):
        if len({(slots[n].dtype, is_dense(n, dense)) for n in names}) > 1:
            raise StateError(
                f"the state has {names[0]!r} and others in one bundle that are of another dtype or "
                f"dense here: attach with the dense patterns it was saved with"
            )
        if not isinstance(memory, Mapping) or not all(
            isinstance(k, str) and isinstance(v, Tensor) for k, v in memory.items()
        ):
            raise StateError(f"the memory of the bundle of {names[0]!r} must be tensors by name")
        size = size_of(assign_offsets([slots[n] for n in names]))
        for key, value in memory.items():
            _check_memory(f"the memory {key!r} of the bundle of {names[0]!r}", key, value, size)
        _check_delivered(sent, size, names[0])
        _check_owned(memory.get(OWNED), sent, part_length(size, saved["world_size"]), names[0])


def check_strides(strides: Any, slots: Mapping[str, Slot]) -> None:
    """Raise StateError unless the saved strides give every entry of a slot a place of its own."""
    if not isinstance(strides, Mapping) or not strides.keys() <= slots.keys():
        raise StateError("the state's strides must be whole numbers by parameter")
    for name, stride in strides.items():
        shape = slots[name].shape
        whole = (
            isinstance(stride, list) and len(stride) == len(shape) and all(map(is_count, stride))
        )
        if not whole or (slots[name].numel and not is_packed(shape, tuple(stride))):
            raise StateError(
                f"the strides of {name!r} cannot be {shown(stride)} with shape {shape}"
            )


def _check_memory(title: str, key: str, value: Tensor, size: int) -> None:
    """Raise StateError unless a method could have left this in the memory of a bundle of `size`."""
    if value.is_complex() or value.layout != torch.strided:
        raise StateError(f"{title} cannot be {kind_of(value)}")
    if value.dtype.is_floating_point and bool(value.isnan().any()):
        raise StateError(f"{title} holds NaN")
    if key not in MEMORIES:
        return
    dtype, dimensions, least, most = MEMORIES[key]
    most = size if key in _PLACES else most
    if (value.dtype, value.dim()) != (dtype, dimensions):
        raise StateError(f"{title} cannot be {kind_of(value)}")
    if value.numel() and not least <= float(value.min()) <= float(value.max()) <= most:
        raise StateError(f"{title} must be from {least:g} to {most:g}")


def _check_delivered(sent: Any, size: int, name: str) -> None:
    """Raise StateError unless `sent` has the form of `pack_pending`, for a bundle of `size`.

    name: the first parameter of the bundle.
    """
    if sent is None:
        return
    title = f"what the bundle of {name!r} delivered"
    if not isinstance(sent, Mapping) or not is_tensor(sent.get("ok"), (torch.bool,), 1):
        raise StateError(f"{title} does not say whether it was finite")
    for field in ("indices", "masked"):
        places = sent.get(field)
        if places is None:
            continue
        if not is_tensor(places, _WHOLE) or (
            places.numel() and not 0 <= int(places.min()) <= int(places.max()) <= size
        ):
            raise StateError(f"{title}: {field} must be from 0 to {size}, got {kind_of(places)}")
    indices, values, loss = (sent.get(k) for k in ("indices", "values", "loss"))
    entries = size if indices is None else indices.numel()
    for field, tensor, length in (("values", values, entries), ("loss", loss, size + 1)):
        if tensor is not None and not is_tensor(tensor, FLOAT, length):
            raise StateError(f"{title}: {field} must be {length} of fp32, got {kind_of(tensor)}")
        # When some rank was not finite, neither is the loss. Then nobody uses it.
        if tensor is not None and bool(sent["ok"]) and not bool(tensor.isfinite().all()):
            raise StateError(f"{title}: {field} holds values that are not finite")
        if tensor is not None and bool(sent["ok"]):
            check_size(f"{title}: {field}", tensor)
    held = sent.get("held")
    if not isinstance(held, list) or not all(_is_held(entry, size) for entry in held):
        raise StateError(f"{title}: held must be fp32 vectors and where in {size} they begin")


def _check_owned(kept: Tensor | None, sent: Any, length: int, name: str) -> None:
    """Raise StateError unless the roundings that an owner keeps are of its part's `length`."""
    last = None if sent is None else sent.get("owned")
    for tensor in (kept, last):
        if tensor is not None and not is_tensor(tensor, FLOAT, length):
            raise StateError(
                f"what an owner keeps of the bundle of {name!r} must be {length} of fp32, got "
                f"{kind_of(tensor)}"
            )
    if last is not None and bool(sent["ok"]):
        check_size(f"what an owner keeps of the bundle of {name!r}", last)


def _is_held(entry: Any, size: int) -> bool:
    """Return True for (offset, finite fp32 vector) that ends within `size`."""
    if not isinstance(entry, list | tuple) or len(entry) != 2 or not is_count(entry[0]):
        return False
    fits = is_tensor(entry[1], FLOAT) and entry[0] + entry[1].numel() <= size
    return fits and bool(entry[1].isfinite().all())


def _is_lists_of_names(bundles: Any) -> bool:
    return is_list_of(list, bundles) and all(names and is_list_of(str, names) for names in bundles)
