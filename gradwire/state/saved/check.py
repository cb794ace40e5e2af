"""Checks of a saved state: every type, length and index, before anything is changed.

A file may be damaged, forged or of another model. Each function raises StateError with the first
fault that it finds, so that a load that is refused leaves the running state alone.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import StateError
from gradwire.types import Slot

MOST = 2**48
"""More steps, or ranks, than a run can have."""
_MANY, _DEEP = 2**22, 32
"""More values, and deeper lists, than a state has. A list of one list, repeated, may have more."""
FLOAT = (torch.float32,)
LARGEST = 2.0**116
"""The largest residual that a run can use: a sum over 4096 ranks is still finite in fp32."""
_MOST_COUNTED = 2**60
"""More entries or bytes than a run can send."""


def check_sizes(saved: Any) -> None:
    """Raise StateError for a tensor longer than its memory, or for too many or too deep values.

    A few bytes can declare one number to be a tensor of 2**40 entries. Any look at such a tensor
    takes for ever, so this check comes before all others.
    """
    waiting, seen = [(saved, 0)], 0
    while waiting:
        value, depth = waiting.pop()
        seen += 1
        if seen > _MANY or depth > _DEEP:
            raise StateError(f"the state holds more than {_MANY} values, or lists {_DEEP} deep")
        if isinstance(value, Mapping):
            waiting.extend((item, depth + 1) for item in value.values())
        elif isinstance(value, list | tuple):
            waiting.extend((item, depth + 1) for item in value)
        elif isinstance(value, Tensor) and (value.is_meta or _is_stretched(value)):
            raise StateError(f"the state holds {kind_of(value)} of which it has not the values")


def _is_stretched(value: Tensor) -> bool:
    """Return True if the tensor has more entries than its memory."""
    if value.layout != torch.strided:
        return False
    return value.numel() * value.element_size() > value.untyped_storage().nbytes()


def check_numbers(saved: Mapping[str, Any]) -> None:
    """Raise StateError unless ranks, steps, counts, scale and learning rate are valid numbers."""
    for name in ("rank", "world_size", "steps"):
        check_count(name, saved[name])
    counts = saved["counts"]
    if not isinstance(counts, Mapping) or not all(map(is_count, counts.values())):
        raise StateError("the state's counts must be whole numbers by name")
    for name, count in counts.items():
        most = saved["steps"] if name == "skipped" else _MOST_COUNTED
        if count > most:
            raise StateError(f"the state's count {name!r:.40} is {count}, more than {most}")
    scale = saved.get("scale")
    if scale is not None and not (is_tensor(scale, FLOAT, 1) and 0 < float(scale) < math.inf):
        raise StateError(f"the state's scale must be one fp32 number above 0, got {kind_of(scale)}")
    worth = saved.get("worth", [0.0, 1.0])
    if not isinstance(worth, list) or len(worth) != 2 or not all(map(_is_rate, worth)):
        raise StateError(f"the state's worth must be a rate and a factor, got {shown(worth)}")
    if not isinstance(saved["config"], Mapping):
        raise StateError("the state's config must be fields by name")


def check_tensors(field: str, tensors: Any, slots: Mapping[str, Slot]) -> None:
    """Raise StateError unless every parameter has a finite fp32 tensor of the parameter's shape."""
    if not isinstance(tensors, Mapping):
        raise StateError(f"the state's {field} must be tensors by name")
    for name, slot in slots.items():
        _check_tensor(f"{field} of {name!r}", tensors.get(name), slot.shape)
        check_size(f"{field} of {name!r}", tensors[name])


def _check_tensor(
    title: str,
    value: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    infinite: bool = False,
) -> None:
    """Raise StateError unless `value` is a finite tensor of this shape and dtype.

    title: the words for the tensor in the error. infinite: True allows infinities, as in a mask;
    NaN is never allowed.
    """
    wanted = str(dtype).removeprefix("torch.").replace("float32", "fp32")
    if not isinstance(value, Tensor) or (value.layout, value.dtype) != (torch.strided, dtype):
        article = "an" if wanted[0] in "fi" else "a"
        raise StateError(f"{title} must be {article} {wanted} tensor, got {kind_of(value)}")
    if tuple(value.shape) != shape:
        raise StateError(f"{title} has shape {tuple(value.shape)}, the model's is {shape}")
    # No step leaves NaN or infinity behind. In a residual it would stay for good.
    if dtype.is_floating_point:
        bad = int((value.isnan() if infinite else ~value.isfinite()).sum())
        if bad:
            kind = "NaN" if infinite else "not finite"
            raise StateError(f"{title} holds {bad} values that are {kind}")


def check_size(title: str, value: Tensor) -> None:
    """Raise StateError for a value of which the sum over ranks could overflow.

    The next step would lose it, and all that waits with it.
    """
    if value.numel() and float(value.abs().max()) > LARGEST:
        raise StateError(f"{title} holds values above 2**116, which no step can send")


def check_alike(field: str, saved: Any, model: Mapping[str, Tensor]) -> None:
    """Raise StateError unless saved and model's tensors have the same names, shapes and dtypes.

    Saved tensors must be finite. Only buffers may hold infinities: a transformer's mask has -inf.
    """
    if not isinstance(saved, Mapping) or saved.keys() != model.keys():
        names = sorted(saved.keys() ^ model.keys()) if isinstance(saved, Mapping) else []
        raise StateError(f"the state and this model differ in {field}: {names[:3]}")
    for name, tensor in model.items():
        shape = tuple(tensor.shape)
        infinite = field == "buffers"
        _check_tensor(f"{field} of {name!r}", saved[name], shape, tensor.dtype, infinite)
        if field == "velocity":
            check_size(f"{field} of {name!r}", saved[name])


def check_count(name: str, value: Any) -> None:
    """Raise StateError unless `value` is a number of steps."""
    if not is_count(value) or value > MOST:
        raise StateError(
            f"the state's {name} must be a whole number of at most 2**48, got {shown(value)}"
        )


def is_list_of(kind: type, values: Any) -> bool:
    """Return True for a list in which every value is a `kind`."""
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def is_tensor(value: Any, dtypes: Sequence[torch.dtype], length: int | None = None) -> bool:
    """Return True for a flat or 0-d tensor of one of `dtypes`, with `length` entries if given."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.dtype not in dtypes:
        return False
    return value.dim() < 2 and length in (None, value.numel())


def is_whole(value: Any) -> bool:
    """Return True for a whole number below 2**63 that is no truth value."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def is_count(value: Any) -> bool:
    """Return True for a whole number from 0 to 2**63."""
    return is_whole(value) and value >= 0


def _is_rate(value: Any) -> bool:
    return isinstance(value, float) and 0 <= value < math.inf


def shown(value: Any) -> str:
    """Return a value as one line of at most 60 characters, for an error."""
    return " ".join(f"{value!r:.200}".split())[:60]


def kind_of(value: Any) -> str:
    """Return words for the type of a value, for a tensor its dtype and shape."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
