"""Whether a saved state is whole: every type, length and index, before anything is changed."""

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

LIKE_PARAMETER = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum"}
"""What torch's optimisers keep in the shape of the parameter; others may keep it factored."""
SQUARES = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"}
MOST = 2**48
"""More steps, or ranks, than there can have been."""
MANY, DEEP = 2**22, 32
"""More than there is in a state; a list of one list, many times over, may have more."""
FLOAT, WHOLE = (torch.float32,), (torch.int32, torch.int64)


def check_sizes(saved: Any) -> None:
    """Raises StateError for a tensor that is longer than what holds it, or for values without end.

    A few bytes can say of one number that it is a tensor of 2**40: to look at it takes for ever.
    """
    waiting, seen = [(saved, 0)], 0
    while waiting:
        value, depth = waiting.pop()
        seen += 1
        if seen > MANY or depth > DEEP:
            raise StateError(f"the state holds more than {MANY} values, or lists {DEEP} deep")
        if isinstance(value, Mapping):
            waiting.extend((one, depth + 1) for one in value.values())
        elif isinstance(value, list | tuple):
            waiting.extend((one, depth + 1) for one in value)
        elif isinstance(value, Tensor) and (value.is_meta or _is_stretched(value)):
            raise StateError(f"the state holds {_words(value)} of which it has not the values")


def _is_stretched(value: Tensor) -> bool:
    if value.layout != torch.strided:
        return False
    return value.numel() * value.element_size() > value.untyped_storage().nbytes()


def check_numbers(saved: Mapping[str, Any]) -> None:
    """Raises StateError unless the counters of a saved state are counters."""
    for name in ("rank", "world_size", "steps"):
        check_count(name, saved[name])
    counts = saved["counts"]
    if not isinstance(counts, Mapping) or not all(map(_is_whole, counts.values())):
        raise StateError("the state's counts must be whole numbers by name")
    scale = saved.get("scale")
    if scale is not None and not (_is_tensor(scale, FLOAT, 1) and 0 < float(scale) < math.inf):
        raise StateError(f"the state's scale must be one fp32 number above 0, got {_words(scale)}")
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
        check_tensor(f"{what} of {name!r}", tensors.get(name), slot.shape)


def check_tensor(
    what: str,
    found: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    infinite: bool = False,
) -> None:
    """Raises StateError unless `found` is a tensor of this shape and dtype, and finite.

    infinite: whether infinities are right too, as in a mask. NaN never is.
    """
    wanted = str(dtype).removeprefix("torch.").replace("float32", "fp32")
    if not isinstance(found, Tensor) or (found.layout, found.dtype) != (torch.strided, dtype):
        article = "an" if wanted[0] in "fi" else "a"
        raise StateError(f"{what} must be {article} {wanted} tensor, got {_words(found)}")
    if tuple(found.shape) != shape:
        raise StateError(f"{what} has shape {tuple(found.shape)}, the model's is {shape}")
    # No step leaves such values behind, and one of them would stay for good.
    if dtype.is_floating_point:
        bad = int((found.isnan() if infinite else ~found.isfinite()).sum())
        if bad:
            kind = "NaN" if infinite else "not finite"
            raise StateError(f"{what} holds {bad} values that are {kind}")


def check_alike(what: str, found: Any, here: Mapping[str, Tensor]) -> None:
    """Raises StateError unless `found` has tensors of the same names, shapes and dtypes.

    They are finite, but for buffers: the mask of a transformer has -inf.
    """
    if not isinstance(found, Mapping) or found.keys() != here.keys():
        names = sorted(found.keys() ^ here.keys()) if isinstance(found, Mapping) else []
        raise StateError(f"the state and this model differ in {what}: {names[:3]}")
    for name, tensor in here.items():
        shape = tuple(tensor.shape)
        infinite = what == "buffers"
        check_tensor(f"{what} of {name!r}", found[name], shape, tensor.dtype, infinite)


def check_count(name: str, value: Any) -> None:
    """Raises StateError unless `value` is a number of steps."""
    if not _is_count(value) or value > MOST:
        raise StateError(
            f"the state's {name} must be a whole number of at most 2**48, got {value!r:.60}"
        )


def check_optimizer(saved: Any, optimizer: Optimizer, kind: Any = None) -> None:
    """Raises StateError unless `saved` is of such an optimiser of the same parameters.

    torch's own load_state_dict takes another optimiser's state, and fails at the next step.
    """
    name = type(optimizer).__name__
    if kind is not None and kind != name:
        raise StateError(
            f"the state is of the optimiser {kind!r:.60}, this is {name}: use the same"
        )
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        raise StateError("the state's optimiser must have 'state' and 'param_groups'")
    groups, there = optimizer.param_groups, saved["param_groups"]
    if not isinstance(there, list) or not all(isinstance(group, Mapping) for group in there):
        raise StateError("the parameter groups of the state's optimiser must be dictionaries")
    sizes = [len(group["params"]) for group in groups]
    if not all(_is_places(group.get("params", [])) for group in there):
        raise StateError("the parameters of the state's optimiser must be whole numbers")
    if (found := [len(group.get("params", ())) for group in there]) != sizes:
        raise StateError(
            f"the optimiser of the state has parameter groups of {found}, this one of {sizes}"
        )
    # A newer torch may know more settings; another optimiser both lacks some and has others.
    for group, other in zip(groups, there, strict=True):
        lacks = optimizer.defaults.keys() - other.keys()
        if lacks and other.keys() - group.keys() - {"param_names"}:
            raise StateError(
                f"the state is of another optimiser than {name}: it has no {sorted(lacks)[0]!r}"
            )
    places = [place for group in there for place in group["params"]]
    parameters = [parameter for group in groups for parameter in group["params"]]
    by_place = dict(zip(places, parameters, strict=True))
    if not isinstance(saved["state"], Mapping) or not saved["state"].keys() <= by_place.keys():
        raise StateError("the state's optimiser remembers parameters that it has not")
    for index, values in saved["state"].items():
        _check_moments(index, values, by_place[index])
    names = {frozenset(values) for values in saved["state"].values()}
    if len(names) > 1:
        odd = sorted(map(str, frozenset.union(*names) - frozenset.intersection(*names)))
        raise StateError(f"the optimiser's state has {odd[0]!r} for some parameters only")
    _rehearse(saved, optimizer)


def _rehearse(saved: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Raises StateError unless a copy of the optimiser takes the state, with settings of its kind.

    torch's own load_state_dict takes any setting, and fails at the next step.
    """
    # A shallow copy has no hooks, and load_state_dict gives it a state and groups of its own.
    other = copy.copy(optimizer)
    try:
        other.load_state_dict({**saved})
    except Exception as error:  # of every kind, as the state is
        raise StateError(f"the optimiser does not take its state: {one_line(error)}") from error
    for group in other.param_groups:
        for key, default in optimizer.defaults.items():
            if key not in group or not _is_setting(group[key], default):
                found = group.get(key)
                raise StateError(f"{key!r} of the state's optimiser cannot be {found!r:.60}")


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
    return isinstance(params, list) and all(map(_is_whole, params))


def _check_moments(place: Any, values: Any, parameter: Tensor) -> None:
    if not isinstance(values, Mapping):
        raise StateError(f"the optimiser's state of parameter {place} must be values by name")
    for key, value in values.items():
        what = f"{key!r} of the optimiser's parameter {place}"
        if not isinstance(value, Tensor):
            if key in LIKE_PARAMETER and value is not None:
                raise StateError(f"{what} must be a tensor, got {_words(value)}")
            if key == "step" and not _is_setting(value, 0.0):
                raise StateError(f"{what} must be a number, got {_words(value)}")
            continue
        if value.layout != torch.strided or (key == "step" and value.numel() != 1):
            raise StateError(f"{what} cannot be {_words(value)}")
        if key in SQUARES and not bool((value >= 0).all()):
            raise StateError(f"{what} holds values below 0, and is of squares")
        if key in LIKE_PARAMETER and value.shape != parameter.shape:
            raise StateError(
                f"{what} has shape {tuple(value.shape)}, the parameter's is "
                f"{tuple(parameter.shape)}"
            )
        if value.dtype.is_floating_point and not bool(value.isfinite().all()):
            raise StateError(f"{what} holds values that are not finite")


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
        # Where some rank was not finite the loss is not either, and is not used.
        if tensor is not None and bool(sent["ok"]) and not bool(tensor.isfinite().all()):
            raise StateError(f"{what}: {field} holds values that are not finite")
    held = sent.get("held")
    if not isinstance(held, list) or not all(_is_held(entry, size) for entry in held):
        raise StateError(f"{what}: held must be fp32 vectors and where in {size} they begin")


def _is_held(entry: Any, size: int) -> bool:
    if not isinstance(entry, list | tuple) or len(entry) != 2 or not _is_count(entry[0]):
        return False
    fits = _is_tensor(entry[1], FLOAT) and entry[0] + entry[1].numel() <= size
    return fits and bool(entry[1].isfinite().all())


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
