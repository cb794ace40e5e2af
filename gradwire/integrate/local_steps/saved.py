"""The part of a checkpoint that only local steps have: weights, buffers and optimisers."""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradwire.errors import StateError
from gradwire.state.saved.check import check_alike, check_count, check_optimizer

if TYPE_CHECKING:
    from gradwire.integrate.local_steps import LocalSteps


def pack(local: "LocalSteps") -> dict[str, Any]:
    """Return this rank's weights, buffers and optimisers.

    One optimiser is saved as it is, several as a list.
    """
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in local.optimizers]
    kinds = [type(optimizer).__name__ for optimizer in local.optimizers]
    is_one = len(states) == 1
    return {
        "weights": _copies(local.parts.read()),
        "local": {
            "inner_steps": local.inner_steps,
            "reference": _copies(local.reference),
            "velocity": _copies(local.velocity),
            "buffers": _copies(dict(local.model.named_buffers())),
            "optimizer": states[0] if is_one else states,
            "optimizer_kind": kinds[0] if is_one else kinds,
            "keep_unsent": local.keep_unsent,
        },
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
    for kind, in_state, in_model in (
        ("weights", saved["weights"], local.parts.read()),
        ("reference", part["reference"], local.reference),
        ("velocity", part["velocity"], local.velocity),
        ("buffers", part["buffers"], dict(local.model.named_buffers())),
    ):
        check_alike(kind, in_state, in_model)
    states, kinds = _listed(part.get("optimizer")), _listed(part.get("optimizer_kind"))
    if len(states) != len(local.optimizers):
        raise StateError(
            f"the state is of {len(states)} optimisers, here are {len(local.optimizers)}"
        )
    # Old states do not name the kind.
    kinds += [None] * (len(states) - len(kinds))
    for state, optimizer, name in zip(states, local.optimizers, kinds, strict=False):
        check_optimizer(state, optimizer, name)


def load(local: "LocalSteps", saved: Mapping[str, Any]) -> None:
    """Copy weights, x, m, buffers and the optimisers' state from a checked state."""
    part = saved["local"]
    local.inner_steps = part["inner_steps"]
    buffers = dict(local.model.named_buffers())
    for target, source in (
        (local.reference, part["reference"]),
        (local.velocity, part["velocity"]),
        (buffers, part["buffers"]),
    ):
        for name, tensor in target.items():
            tensor.copy_(source[name])
    local.parts.put(saved["weights"])
    for optimizer, state in zip(local.optimizers, _listed(part["optimizer"]), strict=True):
        optimizer.load_state_dict(state)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone().cpu() for name, tensor in tensors.items()}
