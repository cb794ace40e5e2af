"""Checks of a saved state: every type, length and index, before anything is changed.

A file may be damaged, forged or of another model. Each function raises StateError with the first
fault that it finds, so that a load that is refused leaves the running state alone.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwire.errors import StateError, one_line
from gradwire.types import Slot

_SQUARES = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"}
"""Moments that are sums of squares, so never below 0."""
_LIKE_PARAMETER = _SQUARES | {"exp_avg", "momentum_buffer"}
"""Moments that torch's optimisers keep in the shape of the parameter; others may factor them."""
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
        raise StateError(f"the state's worth must be a rate and a factor, got {worth!r:.60}")
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
            f"the state's {name} must be a whole number of at most 2**48, got {value!r:.60}"
        )


def _check_step(title: str, value: Any) -> None:
    """Raise StateError unless `value` is an optimiser's number of steps."""
    if not _is_setting(value, 0.0) or value > MOST:
        raise StateError(f"{title} must be a number from 0 to 2**48, got {value!r:.60}")


def check_optimizer(saved: Any, optimizer: Optimizer, kind: Any = None) -> None:
    """Raise StateError unless `saved` is the state of the same optimiser for the same parameters.

    kind: the class name that was saved. torch's own load_state_dict takes the state of another
    optimiser, and the next step fails.
    """
    name = type(optimizer).__name__
    if kind is not None and kind != name:
        raise StateError(
            f"the state is of the optimiser {kind!r:.60}, this is {name}: use the same"
        )
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        raise StateError("the state's optimiser must have 'state' and 'param_groups'")
    groups, saved_groups = optimizer.param_groups, saved["param_groups"]
    if not is_list_of(Mapping, saved_groups):
        raise StateError("the parameter groups of the state's optimiser must be dictionaries")
    sizes = [len(group["params"]) for group in groups]
    if not all(_is_places(group.get("params", [])) for group in saved_groups):
        raise StateError("the parameters of the state's optimiser must be whole numbers")
    if (saved_sizes := [len(group.get("params", ())) for group in saved_groups]) != sizes:
        raise StateError(
            f"the optimiser of the state has parameter groups of {saved_sizes}, this one of {sizes}"
        )
    # A newer torch may know more settings. Another optimiser both lacks settings and adds some.
    for group, other in zip(groups, saved_groups, strict=True):
        lacks = optimizer.defaults.keys() - other.keys()
        if lacks and other.keys() - group.keys() - {"param_names"}:
            raise StateError(
                f"the state is of another optimiser than {name}: it has no {sorted(lacks)[0]!r}"
            )
    places = [place for group in saved_groups for place in group["params"]]
    parameters = [parameter for group in groups for parameter in group["params"]]
    by_place = dict(zip(places, parameters, strict=True))
    if not isinstance(saved["state"], Mapping) or not saved["state"].keys() <= by_place.keys():
        raise StateError("the state's optimiser remembers parameters that it has not")
    for index, values in saved["state"].items():
        _check_moments(index, values, by_place[index])
    # An optimiser may have a rule of its own for each group of parameters.
    for group in saved_groups:
        known = [saved["state"][place] for place in group["params"] if place in saved["state"]]
        names = {frozenset(values) for values in known}
        if len(names) > 1:
            partial = sorted(map(str, frozenset.union(*names) - frozenset.intersection(*names)))
            raise StateError(f"the optimiser's state has {partial[0]!r} for some parameters only")
    _rehearse(saved, optimizer)


def _rehearse(saved: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Raise StateError unless a copy of the optimiser takes the state with settings of its kind.

    torch's own load_state_dict takes any setting, and the next step fails.
    """
    # A shallow copy has no hooks, and load_state_dict gives it a state and groups of its own.
    rehearsal = copy.copy(optimizer)
    try:
        rehearsal.load_state_dict({**saved})
    except Exception as error:  # a state of any kind raises an error of any kind
        raise StateError(f"the optimiser does not take its state: {one_line(error)}") from error
    for group, own in zip(rehearsal.param_groups, optimizer.param_groups, strict=True):
        for key, like in own.items():
            # A scheduler adds settings of its own, which a saved group need not have.
            if key == "params" or (key not in group and key not in optimizer.defaults):
                continue
            value = group.get(key)
            if not _is_setting(value, like) or not _is_decay(key, value):
                raise StateError(f"{key!r} of the state's optimiser cannot be {value!r:.60}")


def _is_setting(value: Any, like: Any) -> bool:
    """Return True if the value is a setting of the same kind, finite, and not below 0.

    No optimiser of torch has a number below 0, but for one whose own default is.
    """
    if isinstance(like, list | tuple):
        alike = isinstance(value, list | tuple) and len(value) == len(like)
        return alike and all(map(_is_setting, value, like))
    if isinstance(like, int | float | Tensor) and not isinstance(like, bool):
        number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)
        return number and math.isfinite(value) and bool(value >= 0 or like < 0)
    return not isinstance(value, str) or isinstance(like, str)


def _is_decay(key: str, value: Any) -> bool:
    """Return False for averages that would never forget, or grow."""
    return key != "betas" or all(beta < 1 for beta in value)


def _is_places(params: Any) -> bool:
    """Return True if these are the numbers by which an optimiser's state names parameters."""
    return isinstance(params, list) and all(map(_is_whole, params))


def _check_moments(place: Any, values: Any, parameter: Tensor) -> None:
    """Raise StateError unless the optimiser's values of one parameter fit the parameter."""
    if not isinstance(values, Mapping):
        raise StateError(f"the optimiser's state of parameter {place} must be values by name")
    for key, value in values.items():
        title = f"{key!r} of the optimiser's parameter {place}"
        if not isinstance(value, Tensor):
            if key in _LIKE_PARAMETER and value is not None:
                raise StateError(f"{title} must be a tensor, got {kind_of(value)}")
            if key == "step":
                _check_step(title, value)
            continue
        may_count = key not in _LIKE_PARAMETER and not value.is_complex()
        if value.layout != torch.strided or not (value.is_floating_point() or may_count):
            raise StateError(f"{title} cannot be {kind_of(value)}")
        if key == "step":
            _check_step(title, value)
        if key in _SQUARES and not bool((value >= 0).all()):
            raise StateError(f"{title} holds values below 0, and is of squares")
        if key in _LIKE_PARAMETER and value.shape != parameter.shape:
            raise StateError(
                f"{title} has shape {tuple(value.shape)}, the parameter's is "
                f"{tuple(parameter.shape)}"
            )
        if value.dtype.is_floating_point and not bool(value.isfinite().all()):
            raise StateError(f"{title} holds values that are not finite")


def is_list_of(kind: type, values: Any) -> bool:
    """Return True for a list in which every value is a `kind`."""
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def is_tensor(value: Any, dtypes: Sequence[torch.dtype], length: int | None = None) -> bool:
    """Return True for a flat or 0-d tensor of one of `dtypes`, with `length` entries if given."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.dtype not in dtypes:
        return False
    return value.dim() < 2 and length in (None, value.numel())


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def is_count(value: Any) -> bool:
    """Return True for a whole number from 0 to 2**63."""
    return _is_whole(value) and value >= 0


def _is_rate(value: Any) -> bool:
    return isinstance(value, float) and 0 <= value < math.inf


def kind_of(value: Any) -> str:
    """Return words for the type of a value, for a tensor its dtype and shape."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
