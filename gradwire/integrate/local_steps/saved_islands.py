"""Checkpoints of islands: the entries of a sharded model's folder that local steps add and read."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire.errors import StateError
from gradwire.integrate.local_steps.saved import copy_all, pack_numbers
from gradwire.state.saved.cuts import MoreSaved
from gradwire.types import local_of

if TYPE_CHECKING:
    from gradwire.integrate.local_steps.handle import LocalSteps

_Moment = tuple[int, str, str]
"""An optimiser's number, the name of a moment, and the name of a parameter."""


def more_saved(local: "LocalSteps") -> MoreSaved:
    """Return what an island saves beside residuals: weights, x, momentum, moments and numbers."""
    cuts = local.cuts()

    def wrapped(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # x may be in the host's memory.
        return {
            name: cuts[name].wrap(part.to(local.device, copy=True)) for name, part in parts.items()
        }

    shared = {"reference": wrapped(local.reference)}
    if local.velocity:
        shared["outer"] = wrapped(local.velocity)
    vectors: dict[str, Any] = {"weights": wrapped(local.parts.read())}
    for flight in local.flights:
        vectors.setdefault("departures", {}).update(wrapped(flight.taken))
        shared.setdefault("update", {}).update(wrapped(flight.values))
    numbers = pack_numbers(local)
    moments: dict[_Moment, Tensor] = {}
    for number, state in enumerate(numbers["optimizer"]):
        moments |= _take_moments(local, number, state)
    for (number, key, name), moment in moments.items():
        by_key = vectors.setdefault("optimizer", {}).setdefault(str(number), {})
        by_key.setdefault(key, {})[name] = moment
    numbers |= {
        "island": local.parts.kind,
        "buffers": copy_all(dict(local.model.named_buffers())),
        "moments": [list(moment) for moment in moments],
        "outer": bool(local.velocity),
    }
    return MoreSaved(vectors, shared, {"local": numbers})


def _take_moments(local: "LocalSteps", number: int, state: dict[str, Any]) -> dict[_Moment, Tensor]:
    """Take the tensors that are as long as their parameters out of an optimiser's state."""
    places = dict(_places(local, number))
    out: dict[_Moment, Tensor] = {}
    for place, values in state["state"].items():
        name, parameter = places[place]
        for key, value in list(values.items()):
            if not isinstance(value, Tensor):
                continue
            same = value.shape == parameter.shape and value.dim() > 0
            if hasattr(value, "placements") and not same:
                raise StateError(
                    f"{key!r} of {name}: a sharded moment of another shape than its parameter "
                    f"cannot be saved by local steps; use another optimiser"
                )
            if same:
                out[number, key, name] = values.pop(key)
    return out


def _places(local: "LocalSteps", number: int) -> Iterator[tuple[int, tuple[str, Tensor]]]:
    """Yield the place of each parameter in an optimiser's state, with its name and itself."""
    names = {id(p): name for name, p in local.weights.items()}
    groups = local.optimizers[number].param_groups
    for place, p in enumerate(p for group in groups for p in group["params"]):
        yield place, (names.get(id(p), str(place)), p)


def adopt_vectors(local: "LocalSteps", saved: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Put the vectors of a folder in their places in `saved`, as one rank's state has them."""
    numbers = saved.get("local")
    if not isinstance(numbers, dict):
        return
    local.check_kind(saved)
    if not isinstance(numbers.get("optimizer"), list) or not all(
        isinstance(state, dict) and isinstance(state.get("state"), dict)
        for state in numbers["optimizer"]
    ):
        raise StateError("the state's optimisers must have 'state' and 'param_groups'")
    _refuse_long(local, saved)
    dtypes = {name: p.dtype for name, p in local.weights.items()}
    for field in ("weights", "departures"):
        tensors = _locals(part.get(field, {}))
        saved[field] = {name: t.to(dtypes.get(name, t.dtype)) for name, t in tensors.items()}
    for field, source in (("reference", "reference"), ("velocity", "outer"), ("update", "update")):
        numbers[field] = _locals(part.get(source, {}))
    moments = dict(_flatten(part.get("optimizer", {})))
    places = [
        {name: place for place, (name, _) in _places(local, number)}
        for number in range(len(local.optimizers))
    ]
    for number, key, name in _listed_moments(numbers):
        value = moments.get(f"{number}.{key}.{name}")
        if number >= min(len(places), len(numbers["optimizer"])):
            continue  # the number of optimisers is checked later
        place = places[number].get(name)
        if value is None or place is None:
            raise StateError(
                f"{key!r} of {name} was not read: use gradwire.load(local, folder), which needs no "
                f"moments to be there before"
            )
        numbers["optimizer"][number]["state"].setdefault(place, {})[key] = value


def _listed_moments(numbers: Mapping[str, Any]) -> list[_Moment]:
    """Return the moments that a header lists; raise StateError if it is no such list."""
    moments = numbers.get("moments", [])
    if not isinstance(moments, list) or not all(
        isinstance(m, list) and list(map(type, m)) == [int, str, str] and m[0] >= 0 for m in moments
    ):
        raise StateError("the state's moments must be lists of a number and two names")
    return [tuple(moment) for moment in moments]


def _refuse_long(local: "LocalSteps", saved: Mapping[str, Any]) -> None:
    """Raise StateError for moments of one rank if the number of ranks in an island has changed."""
    if saved.get("shard", [0, local.shards])[1] == local.shards:
        return
    for state in saved["local"]["optimizer"]:
        for values in state["state"].values():
            for key, value in values.items():
                if isinstance(value, Tensor) and value.numel() > 1:
                    raise StateError(
                        f"{key!r} of the optimiser is of {saved['shard'][1]} ranks in an island, "
                        f"here are {local.shards}: it cannot be cut anew"
                    )


def stand_ins(local: "LocalSteps", number: int, state: Any) -> Any:
    """Return an optimiser's state, with shards as zeros of their parameter's shape.

    Checks of an optimiser's state compare whole shapes. The shards are checked here.
    """
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return state
    out: dict[Any, Any] = {}
    for place, values in state["state"].items():
        out[place] = dict(values)
        for key, value in values.items():
            if not hasattr(value, "placements"):
                continue
            part = local_of(value)
            if not bool(part.isfinite().all()) or (key.endswith("_sq") and bool((part < 0).any())):
                raise StateError(
                    f"{key!r} of the optimiser's parameter {place} holds values that cannot be"
                )
            out[place][key] = torch.zeros((), dtype=value.dtype).expand(value.shape)
    return {**state, "state": out}


def _locals(tensors: Any) -> dict[str, Tensor]:
    return {name: local_of(tensor) for name, tensor in tensors.items()}


def _flatten(moments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield "<n>.<key>.<parameter>" and the tensor, from nested or flat moments."""
    for key, value in moments.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{rest}", tensor) for rest, tensor in _flatten(value))
        else:
            yield key, value
