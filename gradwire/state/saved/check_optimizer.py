"""Checks of a saved optimiser's state, for local steps: torch's own load takes anything."""

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from gradwire.errors import StateError, one_line
from gradwire.state.saved.check import MOST, is_list_of, is_whole, kind_of, shown

_SQUARES = {
    *("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta", "exp_inf", "step_size"),
}
"""Moments that are sums of squares, or other sizes, so never below 0."""
_LIKE_PARAMETER = _SQUARES | {"exp_avg", "momentum_buffer", "grad_avg", "prev"}
"""Moments that torch's optimisers keep in the shape of the parameter; others may factor them."""
_NUMBERS = ("step", "mu_product", "eta", "mu")
"""Values of an optimiser that are one number per parameter."""
_LARGEST_SETTING = 2.0**64
"""More than any setting; beyond 3.4e38 a setting is no fp32 number."""


def check_optimizer(saved: Any, optimizer: Optimizer, kind: Any = None) -> None:
    """Raise StateError unless `saved` is the state of the same optimiser for the same parameters.

    kind: the class name that was saved. torch's own load_state_dict takes the state of another
    optimiser, and the next step fails.
    """
    name = type(optimizer).__name__
    if kind is not None and kind != name:
        raise StateError(
            f"the state is of the optimiser {shown(kind)}, this is {name}: use the same"
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
        _check_moments(index, values, by_place[index], isinstance(optimizer, SGD))
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
                raise StateError(f"{key!r} of the state's optimiser cannot be {shown(value)}")


def _is_setting(value: Any, like: Any) -> bool:
    """Return True if the value is a setting of the same kind, finite, and not below 0.

    No optimiser of torch has a number below 0, but for one whose own default is.
    """
    if isinstance(like, list | tuple):
        alike = isinstance(value, list | tuple) and len(value) == len(like)
        return alike and all(map(_is_setting, value, like))
    if isinstance(like, bool):
        return value is None or isinstance(value, bool)
    if like is None:
        return value is None or (isinstance(value, int | float) and math.isfinite(value))
    if isinstance(like, int | float | Tensor):
        number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)
        if not number or isinstance(value, bool) or not abs(value) <= _LARGEST_SETTING:
            return False
        return bool(value >= 0 or like < 0)
    return not isinstance(value, str) or isinstance(like, str)


def _is_decay(key: str, value: Any) -> bool:
    """Return False for averages that would never forget, or grow."""
    return key != "betas" or all(beta < 1 for beta in value)


def _is_places(params: Any) -> bool:
    """Return True if these are the numbers by which an optimiser's state names parameters."""
    return isinstance(params, list) and all(map(is_whole, params))


def _check_moments(place: Any, values: Any, parameter: Tensor, is_sgd: bool) -> None:
    """Raise StateError unless the optimiser's values of one parameter fit the parameter."""
    if not isinstance(values, Mapping):
        raise StateError(f"the optimiser's state of parameter {place} must be values by name")
    for key, value in values.items():
        title = f"{key!r} of the optimiser's parameter {place}"
        if not isinstance(value, Tensor):
            # Only SGD keeps None for a momentum that has not begun.
            if key in _LIKE_PARAMETER and not (value is None and is_sgd):
                raise StateError(f"{title} must be a tensor, got {kind_of(value)}")
            if key in _NUMBERS:
                _check_step(title, value)
            continue
        may_count = key not in _LIKE_PARAMETER and not value.is_complex()
        if value.layout != torch.strided or not (value.is_floating_point() or may_count):
            raise StateError(f"{title} cannot be {kind_of(value)}")
        if key in _NUMBERS:
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


def _check_step(title: str, value: Any) -> None:
    """Raise StateError unless `value` is an optimiser's number of steps."""
    if not _is_setting(value, 0.0) or value > MOST:
        raise StateError(f"{title} must be a number from 0 to 2**48, got {shown(value)}")
