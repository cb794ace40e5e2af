"""Whether a saved state is whole: every type, length and index, before anything is changed."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.accumulate.layout import is_dense, place, size_of
from gradwire.errors import StateError
from gradwire.types import Slot

KEPT = (torch.strided, torch.float32)
FLOAT, WHOLE = (torch.float32,), (torch.int32, torch.int64)


def check_numbers(saved: Mapping[str, Any]) -> None:
    """Raises StateError unless the counters of a saved state are counters."""
    for name in ("rank", "world_size", "steps"):
        if not _is_count(saved[name]):
            raise StateError(f"the state's {name} must be a whole number, got {saved[name]!r:.60}")
    counts = saved["counts"]
    if not isinstance(counts, Mapping) or not all(map(_is_whole, counts.values())):
        raise StateError("the state's counts must be whole numbers by name")
    scale = saved.get("scale")
    if scale is not None and not _is_tensor(scale, FLOAT, 1):
        raise StateError(f"the state's scale must be one fp32 number, got {_words(scale)}")
    worth = saved.get("worth", [0.0, 1.0])
    if not isinstance(worth, list) or len(worth) != 2 or not all(map(_is_rate, worth)):
        raise StateError(f"the state's worth must be a rate and a factor, got {worth!r:.60}")
    if not isinstance(saved["config"], Mapping):
        raise StateError("the state's config must be fields by name")


def check_tensors(what: str, tensors: Any, slots: Mapping[str, Slot]) -> None:
    """Raises StateError unless there is a finite fp32 tensor of its shape for every parameter."""
    if not isinstance(tensors, Mapping):
        raise StateError(f"the state's {what} must be tensors by name")
    for name, slot in slots.items():
        found = tensors.get(name)
        if not isinstance(found, Tensor) or (found.layout, found.dtype) != KEPT:
            raise StateError(f"{what} of {name!r} must be an fp32 tensor, got {_words(found)}")
        if tuple(found.shape) != slot.shape:
            raise StateError(
                f"{what} of {name!r} has shape {tuple(found.shape)}, the model's is {slot.shape}"
            )
        # No step leaves such values behind, and one of them would stay for good.
        if bad := int((~found.isfinite()).sum()):
            raise StateError(f"{what} of {name!r} holds {bad} values that are not finite")


def check_bundles(
    saved: Mapping[str, Any], slots: Mapping[str, Slot], dense: Sequence[str]
) -> None:
    """Raises StateError unless the bundles of a saved state are such as would be made here.

    Each parameter is in one of them, with others of its kind; memories and deliveries fit.
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
        _check_delivered(sent, size_of(place([slots[n] for n in names])), names[0])


def _check_delivered(sent: Any, size: int, name: str) -> None:
    """`sent` is what packing made of a Delivered and what was held, of a bundle of `size`."""
    if sent is None:
        return
    what = f"what the bundle of {name!r} delivered"
    if not isinstance(sent, Mapping) or not _is_tensor(sent.get("ok"), (torch.bool,), 1):
        raise StateError(f"{what} does not say whether it was finite")
    for field in ("indices", "masked"):
        places = sent.get(field)
        if places is None:
            continue
        if not _is_tensor(places, WHOLE) or (
            places.numel() and not 0 <= int(places.min()) <= int(places.max()) <= size
        ):
            raise StateError(f"{what}: {field} must be from 0 to {size}, got {_words(places)}")
    indices, values, loss = (sent.get(k) for k in ("indices", "values", "loss"))
    entries = size if indices is None else indices.numel()
    for field, tensor, length in (("values", values, entries), ("loss", loss, size + 1)):
        if tensor is not None and not _is_tensor(tensor, FLOAT, length):
            raise StateError(f"{what}: {field} must be {length} of fp32, got {_words(tensor)}")
    held = sent.get("held")
    if not isinstance(held, list) or not all(_is_held(entry, size) for entry in held):
        raise StateError(f"{what}: held must be fp32 vectors and where in {size} they begin")


def _is_held(entry: Any, size: int) -> bool:
    if not isinstance(entry, list | tuple) or len(entry) != 2 or not _is_count(entry[0]):
        return False
    return _is_tensor(entry[1], FLOAT) and entry[0] + entry[1].numel() <= size


def _is_lists_of_names(bundles: Any) -> bool:
    return isinstance(bundles, list) and all(
        isinstance(names, list) and names and all(isinstance(name, str) for name in names)
        for names in bundles
    )


def _is_tensor(value: Any, dtypes: Sequence[torch.dtype], length: int | None = None) -> bool:
    """A flat tensor of one of `dtypes`, 0-d where one entry is asked for."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.dtype not in dtypes:
        return False
    return value.dim() < 2 and length in (None, value.numel())


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value >= 0


def _is_rate(value: Any) -> bool:
    return isinstance(value, float) and 0 <= value < math.inf


def _words(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
