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

from gradwire.accumulate.layout import assign_offsets, is_dense, is_packed, size_of
from gradwire.errors import StateError, one_line
from gradwire.types import Slot

_SQUARES = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"}
"""Moments that are sums of squares, so never below 0."""
_LIKE_PARAMETER = _SQUARES | {"exp_avg", "momentum_buffer"}
"""Moments that torch's optimisers keep in the shape of the parameter; others may factor them."""
_MOST = 2**48
"""More steps, or ranks, than a run can have."""
_MANY, _DEEP = 2**22, 32
"""More values, and deeper lists, than a state has. A list of one list, repeated, may have more."""
_FLOAT, _WHOLE = (torch.float32,), (torch.int32, torch.int64)


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
            raise StateError(f"the state holds {_kind_of(value)} of which it has not the values")


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
    if not isinstance(counts, Mapping) or not all(map(_is_whole, counts.values())):
        raise StateError("the state's counts must be whole numbers by name")
    scale = saved.get("scale")
    if scale is not None and not (_is_tensor(scale, _FLOAT, 1) and 0 < float(scale) < math.inf):
        raise StateError(
            f"the state's scale must be one fp32 number above 0, got {_kind_of(scale)}"
        )
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
        raise StateError(f"{title} must be {article} {wanted} tensor, got {_kind_of(value)}")
    if tuple(value.shape) != shape:
        raise StateError(f"{title} has shape {tuple(value.shape)}, the model's is {shape}")
    # No step leaves NaN or infinity behind. In a residual it would stay for good.
    if dtype.is_floating_point:
        bad = int((value.isnan() if infinite else ~value.isfinite()).sum())
        if bad:
            kind = "NaN" if infinite else "not finite"
            raise StateError(f"{title} holds {bad} values that are {kind}")


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


def check_count(name: str, value: Any) -> None:
    """Raise StateError unless `value` is a number of steps."""
    if not _is_count(value) or value > _MOST:
        raise StateError(
            f"the state's {name} must be a whole number of at most 2**48, got {value!r:.60}"
        )


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
    if not _is_list_of(Mapping, saved_groups):
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
        for key, default in optimizer.defaults.items():
            # torch adds defaults while it loads, also to an optimiser that has no such setting.
            if key in own and (key not in group or not _is_setting(group[key], default)):
                value = group.get(key)
                raise StateError(f"{key!r} of the state's optimiser cannot be {value!r:.60}")


def _is_setting(value: Any, like: Any) -> bool:
    """Return True if the value is a setting of the same kind, and finite."""
    if isinstance(like, list | tuple):
        alike = isinstance(value, list | tuple) and len(value) == len(like)
        return alike and all(map(_is_setting, value, like))
    if isinstance(like, int | float | Tensor) and not isinstance(like, bool):
        number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)
        return number and math.isfinite(value)
    return not isinstance(value, str) or isinstance(like, str)


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
                raise StateError(f"{title} must be a tensor, got {_kind_of(value)}")
            if key == "step" and not _is_setting(value, 0.0):
                raise StateError(f"{title} must be a number, got {_kind_of(value)}")
            continue
        if value.layout != torch.strided or (key == "step" and value.numel() != 1):
            raise StateError(f"{title} cannot be {_kind_of(value)}")
        if key in _SQUARES and not bool((value >= 0).all()):
            raise StateError(f"{title} holds values below 0, and is of squares")
        if key in _LIKE_PARAMETER and value.shape != parameter.shape:
            raise StateError(
                f"{title} has shape {tuple(value.shape)}, the parameter's is "
                f"{tuple(parameter.shape)}"
            )
        if value.dtype.is_floating_point and not bool(value.isfinite().all()):
            raise StateError(f"{title} holds values that are not finite")


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
        for key, value in memory.items():
            if value.dtype.is_floating_point and bool(value.isnan().any()):
                raise StateError(f"the memory {key!r} of the bundle of {names[0]!r} holds NaN")
        _check_delivered(sent, size_of(assign_offsets([slots[n] for n in names])), names[0])


def check_strides(strides: Any, slots: Mapping[str, Slot]) -> None:
    """Raise StateError unless the saved strides give every entry of a slot a place of its own."""
    if not isinstance(strides, Mapping) or not strides.keys() <= slots.keys():
        raise StateError("the state's strides must be whole numbers by parameter")
    for name, stride in strides.items():
        shape = slots[name].shape
        whole = (
            isinstance(stride, list) and len(stride) == len(shape) and all(map(_is_count, stride))
        )
        if not whole or (slots[name].numel and not is_packed(shape, tuple(stride))):
            raise StateError(f"the strides of {name!r} cannot be {stride!r:.60} with shape {shape}")


def _check_delivered(sent: Any, size: int, name: str) -> None:
    """Raise StateError unless `sent` has the form of `pack_pending`, for a bundle of `size`.

    name: the first parameter of the bundle.
    """
    if sent is None:
        return
    title = f"what the bundle of {name!r} delivered"
    if not isinstance(sent, Mapping) or not _is_tensor(sent.get("ok"), (torch.bool,), 1):
        raise StateError(f"{title} does not say whether it was finite")
    for field in ("indices", "masked"):
        places = sent.get(field)
        if places is None:
            continue
        if not _is_tensor(places, _WHOLE) or (
            places.numel() and not 0 <= int(places.min()) <= int(places.max()) <= size
        ):
            raise StateError(f"{title}: {field} must be from 0 to {size}, got {_kind_of(places)}")
    indices, values, loss = (sent.get(k) for k in ("indices", "values", "loss"))
    entries = size if indices is None else indices.numel()
    for field, tensor, length in (("values", values, entries), ("loss", loss, size + 1)):
        if tensor is not None and not _is_tensor(tensor, _FLOAT, length):
            raise StateError(f"{title}: {field} must be {length} of fp32, got {_kind_of(tensor)}")
        # When some rank was not finite, neither is the loss. Then nobody uses it.
        if tensor is not None and bool(sent["ok"]) and not bool(tensor.isfinite().all()):
            raise StateError(f"{title}: {field} holds values that are not finite")
    held = sent.get("held")
    if not isinstance(held, list) or not all(_is_held(entry, size) for entry in held):
        raise StateError(f"{title}: held must be fp32 vectors and where in {size} they begin")


def _is_held(entry: Any, size: int) -> bool:
    """Return True for (offset, finite fp32 vector) that ends within `size`."""
    if not isinstance(entry, list | tuple) or len(entry) != 2 or not _is_count(entry[0]):
        return False
    fits = _is_tensor(entry[1], _FLOAT) and entry[0] + entry[1].numel() <= size
    return fits and bool(entry[1].isfinite().all())


def _is_lists_of_names(bundles: Any) -> bool:
    return _is_list_of(list, bundles) and all(
        names and _is_list_of(str, names) for names in bundles
    )


def _is_list_of(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def _is_tensor(value: Any, dtypes: Sequence[torch.dtype], length: int | None = None) -> bool:
    """Return True for a flat or 0-d tensor of one of `dtypes`, with `length` entries if given."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.dtype not in dtypes:
        return False
    return value.dim() < 2 and length in (None, value.numel())


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value >= 0


def _is_rate(value: Any) -> bool:
    return isinstance(value, float) and 0 <= value < math.inf


def _kind_of(value: Any) -> str:
    """Return words for the type of a value, for a tensor its dtype and shape."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
