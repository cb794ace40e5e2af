"""What one rank remembers, as plain tensors, numbers and strings, and back."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire.accumulate.layout import assign_offsets
from gradwire.config import Config
from gradwire.errors import StateError, one_line
from gradwire.state.saved.check import (
    check_bundles,
    check_numbers,
    check_sizes,
    check_strides,
    check_tensors,
)
from gradwire.state.saved.pending import pack_pending, unpack_pending

if TYPE_CHECKING:
    from gradwire.state.state import State

VERSION = 1
IN_COMMON = ("run", "config", "learning rate or flush", "shared weights", "order of parameters")
"""What the parts of one checkpoint have in common. The order is last: it differs between shards."""


@torch.no_grad()
def state_dict(state: "State") -> dict[str, Any]:
    """See `State.state_dict`.

    "residual" holds u, from which "delivered" is still to be subtracted once it is known that the
    optimiser took the last step, and "velocity" the momentum that is still to be masked; so a step
    that turns out to be skipped after a resume is put back just as it would have been without it.
    """
    return header(state) | {
        "residual": _by_name(state, [bundle.buffer for bundle in state.bundles]),
        "velocity": _by_name(state, [bundle.velocity for bundle in state.bundles]),
        "delivered": [pack_pending(bundle) for bundle in state.bundles],
    }


def header(state: "State") -> dict[str, Any]:
    """All of a state but its long vectors."""
    if not state.opened:
        raise StateError("there is nothing to save yet: the parameters are known after a step")
    return {
        "version": VERSION,
        "run": state.identity,
        "rank": state.group.rank,
        "world_size": state.group.size,
        "steps": state.steps,
        "counts": dict(state._counts) | _counts_now(state),
        "scale": None if state.status.scale is None else state.status.scale.cpu(),
        "skipped": bool(state.was_skipped()),
        "user_skip": state.status.by_user,
        "taken": state.status.optimizer_watch is not None
        and bool(state.status.optimizer_watch.stepped),
        "flush": state._flush,
        "worth": [state.lr.rate, state.lr.factor],
        "config": state.config.asdict(),
        "reason": state.reason,
        "bundles": [[slot.name for slot in bundle.slots] for bundle in state.bundles],
        # What was delivered is told by place, and the place of an entry depends on the strides.
        "strides": {slot.name: list(slot.stride) for b in state.bundles for slot in b.slots},
        # Methods change their memory in place.
        "memory": [{k: v.clone().cpu() for k, v in b.memory.items()} for b in state.bundles],
    }


@torch.no_grad()
def load_state_dict(state: "State", saved: Mapping[str, Any]) -> None:
    """See `State.load_state_dict`. Everything is checked before anything is changed."""
    check(state, saved)
    check_rank(state, saved)
    resume(state, saved)


def resume(state: "State", saved: Mapping[str, Any]) -> None:
    """Take over a checked state whole, with what was delivered and is not settled yet."""
    restore(state, saved)
    _take_delivered(state, saved)


def _take_delivered(state: "State", saved: Mapping[str, Any]) -> None:
    strides = saved.get("strides", {})
    for bundle, delivered in zip(state.bundles, saved["delivered"], strict=True):
        bundle.pending = unpack_pending(delivered, bundle, strides)


def check_rank(state: "State", saved: Mapping[str, Any]) -> None:
    """Raises StateError for the state of another rank, or of a run of another size."""
    world = (saved["rank"], saved["world_size"])
    if world != (state.group.rank, state.group.size):
        raise StateError(
            f"this state belongs to rank {world[0]} of {world[1]}, this is rank {state.group.rank} "
            f"of {state.group.size}. gradwire.load(wire, folder) can change the number of ranks."
        )


def check(state: "State", saved: Mapping[str, Any]) -> None:
    """Raises StateError, naming the first thing wrong, unless `saved` belongs to this model."""
    check_sizes(saved)
    if not isinstance(saved, Mapping) or saved.get("version") != VERSION:
        found = saved.get("version") if isinstance(saved, Mapping) else type(saved).__name__
        raise StateError(f"state version is {found!r}, this gradwire reads version {VERSION}")
    if not state.opened:
        raise StateError("load after attach, or after a step: the parameters are not known yet")
    wanted = {slot.name: slot for bundle in state.bundles for slot in bundle.slots}
    residual = saved.get("residual")
    if not isinstance(residual, Mapping):
        raise StateError("the state has no entry 'residual'")
    if missing := [name for name in wanted if name not in residual]:
        raise StateError(f"the state misses {len(missing)} parameters of this model: {missing[:3]}")
    if extra := [name for name in residual if name not in wanted]:
        raise StateError(f"the state has {len(extra)} parameters this model has not: {extra[:3]}")
    fields = ("rank", "world_size", "steps", "counts", "bundles", "memory", "delivered", "config")
    for field in fields:
        if field not in saved:
            raise StateError(f"the state has no entry {field!r}")
    check_numbers(saved)
    _check_choice(state, saved)
    velocity = saved.get("velocity", {})
    if velocity and not state.config.momentum:
        raise StateError(
            f"the state has momentum, this is momentum=0: attach with "
            f"momentum={saved['config'].get('momentum')}"
        )
    for what, tensors in (("residual", residual), ("velocity", velocity)):
        if tensors:
            check_tensors(what, tensors, wanted)
    check_bundles(saved, wanted, state.config.dense)
    check_strides(saved.get("strides", {}), wanted)
    state.check_more(saved)


def in_common(saved: Mapping[str, Any]) -> list[str]:
    """Digests of what all ranks' parts say alike, in the order of IN_COMMON."""
    words = [
        json.dumps(what, sort_keys=True, default=repr)
        for what in (
            [saved.get("run"), saved["steps"]],
            dict(saved["config"]),
            [saved.get("worth"), bool(saved.get("flush"))],
            _shared(saved.get("local", {})),
            saved["bundles"],
        )
    ]
    return [hashlib.sha256(text.encode()).hexdigest() for text in words]


def _shared(local: Mapping[str, Any]) -> list[Any]:
    """Return what local steps keep alike on all ranks, tensors as their sha256."""
    out: list[Any] = [local.get("inner_steps")]
    for what in ("reference", "velocity"):
        for name, tensor in sorted(local.get(what, {}).items()):
            content = tensor.detach().contiguous().cpu().numpy().tobytes()
            out.append([what, name, hashlib.sha256(content).hexdigest()])
    return out


def restore(state: "State", saved: Mapping[str, Any]) -> None:
    """Take over bundles, residuals, memories and counters."""
    homes = {slot.name: slot for bundle in state.bundles for slot in bundle.slots}
    _take_choice(state, saved)
    state.rebundle([assign_offsets([homes[name] for name in names]) for names in saved["bundles"]])
    for bundle, memory in zip(state.bundles, saved["memory"], strict=True):
        for slot in bundle.slots:
            bundle.view(bundle.buffer, slot).copy_(saved["residual"][slot.name])
            if bundle.velocity is not None and saved.get("velocity"):
                bundle.view(bundle.velocity, slot).copy_(saved["velocity"][slot.name])
        bundle.memory.update({k: v.clone().to(state.device) for k, v in memory.items()})
    state.steps = saved["steps"]
    state._counts.clear()
    state._counts.update(saved["counts"])
    state._counts["bytes_before"] -= state.group.bytes_sent
    state.status.count.fill_(state._counts.pop("skipped", 0))
    state._flush = bool(saved.get("flush"))
    if state.status.optimizer_watch is not None:
        state.status.optimizer_watch.stepped.fill_(bool(saved.get("taken")))
    state.lr.rate, state.lr.factor = saved.get("worth", (0.0, 1.0))
    scale = saved.get("scale")
    state.status.scale = None if scale is None else scale.to(state.device)
    # Before "skipped" a state said what there was to tell it from.
    state.status.resume(
        bool(saved.get("skipped", saved.get("user_skip"))),
        None if "skipped" in saved else state.status.scale,
    )


def _take_choice(state: "State", saved: Mapping[str, Any]) -> None:
    """What `method="auto"` had chosen, so that a resumed run goes on as the stopped one; with
    another number of ranks it is measured anew."""
    if not _takes_choice(state, saved):
        return
    state.config = Config(**saved["config"])
    state.auto, state.reason = None, saved["reason"]


def _takes_choice(state: "State", saved: Mapping[str, Any]) -> bool:
    if state.auto is None or saved["world_size"] != state.group.size:
        return False
    return bool(saved.get("reason"))


def _check_choice(state: "State", saved: Mapping[str, Any]) -> None:
    if not isinstance(saved.get("reason", ""), str):
        raise StateError(f"the state's reason must be words, got {type(saved['reason']).__name__}")
    if _takes_choice(state, saved):
        try:
            Config(**saved["config"])
        except Exception as error:  # a value of any kind may be in it
            raise StateError(f"the state's config cannot be: {one_line(error)}") from error


def _by_name(state: "State", vectors: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Each parameter's part of its bundle's vector, where there is one."""
    return {
        slot.name: bundle.view(vector, slot).clone().cpu()
        for bundle, vector in zip(state.bundles, vectors, strict=True)
        if vector is not None
        for slot in bundle.slots
    }


def _counts_now(state: "State") -> dict[str, int]:
    return {
        "sent": state.entries_sent(),
        "skipped": int(state.status.count),
        "clipped": state._counts["clipped"] + sum(int(b.tally.clipped) for b in state.bundles),
        "bytes_before": state._counts["bytes_before"] + state.group.bytes_sent,
    }


def settle_saved(state: "State", saved: dict[str, Any]) -> None:
    """Subtract what a part has delivered, in place of the step that would have done it."""
    restore(state, saved)
    _take_delivered(state, saved)
    skipped = state.was_skipped()
    for bundle in state.bundles:
        bundle.settle(skipped)
    saved["residual"] = _by_name(state, [bundle.buffer for bundle in state.bundles])
    saved["velocity"] = _by_name(state, [bundle.velocity for bundle in state.bundles])
    saved["user_skip"] = saved["skipped"] = False
