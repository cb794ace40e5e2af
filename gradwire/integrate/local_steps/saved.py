"""The part of a checkpoint that only local steps have: weights, buffers and optimisers."""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire.errors import StateError
from gradwire.integrate.local_steps.flights import Flight
from gradwire.state.saved.check import check_alike, check_count, is_list_of
from gradwire.state.saved.check_optimizer import check_optimizer

if TYPE_CHECKING:
    from gradwire.integrate.local_steps import LocalSteps


def pack(local: "LocalSteps") -> dict[str, Any]:
    """Return this rank's weights, buffers and optimisers.

    One optimiser is saved as it is, several as a list.
    """
    numbers = pack_numbers(local)
    for key in ("optimizer", "optimizer_kind"):
        if len(local.optimizers) == 1:
            (numbers[key],) = numbers[key]
    update: dict[str, Tensor] = {}
    departures: dict[str, Tensor] = {}
    for flight in local.flights:
        update |= copy_all(flight.values)
        departures |= copy_all(flight.taken)
    return {
        "weights": copy_all(local.parts.read()),
        "departures": departures,
        "local": {
            **numbers,
            "reference": copy_all(local.reference),
            "velocity": copy_all(local.velocity),
            "update": update,
            "buffers": copy_all(dict(local.model.named_buffers())),
        },
    }


def pack_numbers(local: "LocalSteps") -> dict[str, Any]:
    """Return the numbers and the optimisers, as lists, of a rank."""
    return {
        "inner_steps": local.inner_steps,
        "optimizer": [copy.deepcopy(optimizer.state_dict()) for optimizer in local.optimizers],
        "optimizer_kind": [type(optimizer).__name__ for optimizer in local.optimizers],
        "keep_unsent": local.keep_unsent,
        "fragments": local.fragments,
        "unflushed": sorted(local.unflushed),
        "flights": [
            {"number": f.number, "taken_at": f.taken_at, "due": f.due, "ok": bool(f.ok)}
            for f in local.flights
        ],
    }


def check(local: "LocalSteps", saved: Mapping[str, Any]) -> None:
    """Raise StateError unless weights, buffers, optimisers and rule fit this model."""
    part = saved.get("local")
    if not isinstance(part, Mapping):
        raise StateError("this state is not of local_steps: it has no entry 'local'")
    missing = [k for k in ("inner_steps", "reference", "velocity", "buffers") if k not in part]
    if missing or "weights" not in saved:
        raise StateError(f"the state has no entry {(missing or ['weights'])[0]!r}")
    check_count("inner_steps", part["inner_steps"])
    if bool(part["velocity"]) != bool(local.velocity):
        raise StateError(
            f"the state was saved {'with' if part['velocity'] else 'without'} outer "
            f"momentum, here outer_momentum is {local.outer_momentum:g}: give the same rule"
        )
    if part.get("keep_unsent", local.keep_unsent) != local.keep_unsent:
        raise StateError(
            f"the state was saved with keep_unsent={part['keep_unsent']}, this is "
            f"keep_unsent={local.keep_unsent}: give the same, or what is kept counts twice"
        )
    if part.get("fragments", 1) != local.fragments:
        raise StateError(
            f"the state was saved with fragments={part['fragments']!r:.20}, this is "
            f"fragments={local.fragments}: give the same"
        )
    flying = _check_flights(local, part)
    here = local.parts.read()
    for kind, in_state, in_model in (
        ("weights", saved["weights"], here),
        ("reference", part["reference"], local.reference),
        ("velocity", part["velocity"], local.velocity),
        ("buffers", part["buffers"], dict(local.model.named_buffers())),
        ("update", part.get("update", {}), {n: local.reference[n] for n in flying}),
        ("departures", saved.get("departures", {}), {n: here[n] for n in flying}),
    ):
        check_alike(kind, in_state, in_model)
    states, kinds = _listed(part.get("optimizer")), _listed(part.get("optimizer_kind"))
    if len(states) != len(local.optimizers):
        raise StateError(
            f"the state is of {len(states)} optimisers, here are {len(local.optimizers)}"
        )
    # Old states do not name the kind.
    kinds += [None] * (len(states) - len(kinds))
    for number, (state, name) in enumerate(zip(states, kinds, strict=False)):
        if local.parts.axes:
            from gradwire.integrate.local_steps.saved_islands import stand_ins

            state = stand_ins(local, number, state)
        check_optimizer(state, local.optimizers[number], name)


def _check_flights(local: "LocalSteps", part: Mapping[str, Any]) -> list[str]:
    """Return the names of the parameters whose update has not landed; raise for a forged note."""
    flights, unflushed = part.get("flights", []), part.get("unflushed", [])
    fields = {"number", "taken_at", "due", "ok"}
    if not is_list_of(dict, flights) or any(flight.keys() != fields for flight in flights):
        raise StateError("the state's flights must have number, taken_at, due and ok")
    for flight in flights:
        check_count("taken_at", flight["taken_at"])
        check_count("due", flight["due"])
        if not flight["taken_at"] <= part["inner_steps"] < flight["due"]:
            raise StateError(
                f"the state is of step {part['inner_steps']}, and has an update that was due at "
                f"step {flight['due']}"
            )
    numbers = [*(flight["number"] for flight in flights)]
    known = set(range(local.fragments))
    if not isinstance(unflushed, list) or not {*map(repr, [*numbers, *unflushed])} <= {
        *map(repr, known)
    }:
        raise StateError("the state names fragments that are not there")
    if len(set(numbers)) < len(numbers):
        raise StateError("the state has two updates of one fragment")
    return [name for name, number in local.fragment_of.items() if number in numbers]


def load(local: "LocalSteps", saved: Mapping[str, Any]) -> None:
    """Copy weights, x, m, buffers and the optimisers' state from a checked state."""
    part = saved["local"]
    local.inner_steps = part["inner_steps"]
    for vectors, source in (
        (local.reference, part["reference"]),
        (local.velocity, part["velocity"]),
    ):
        for name in vectors:
            vectors.put(name, source[name])
    for name, buffer in local.model.named_buffers():
        buffer.copy_(part["buffers"][name])
    local.parts.put(saved["weights"])
    local.parts.refresh()
    local.flights[:] = [_flight(local, saved, note) for note in part.get("flights", [])]
    for optimizer, state in zip(local.optimizers, _listed(part["optimizer"]), strict=True):
        optimizer.load_state_dict(state)


def _flight(local: "LocalSteps", saved: Mapping[str, Any], note: Mapping[str, Any]) -> Flight:
    """Return a flight whose exchange has ended, and which lands later."""
    names = [name for name, number in local.fragment_of.items() if number == note["number"]]
    here = local.parts.read(names)
    return Flight(
        note["number"],
        note["taken_at"],
        note["due"],
        False,
        {n: saved["local"]["update"][n].to(local.device, torch.float32).clone() for n in names},
        {n: saved["departures"][n].to(local.device, here[n].dtype).clone() for n in names},
        torch.tensor(bool(note["ok"]), dtype=torch.bool, device=local.device),
    ).arrived()


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def copy_all(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies in the host's memory."""
    return {name: tensor.detach().clone().cpu() for name, tensor in tensors.items()}
