"""One rank's State as a dictionary of plain tensors, numbers and strings, and back.

The dictionary is the part that a rank writes into a checkpoint. A State is taken over in two steps:
`check_state` raises for any fault, then `resume` or `restore` changes the State.
"""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire.accumulate.layout import assign_offsets
from gradwire.accumulate.lr import LrTracker
from gradwire.accumulate.owned import OWNED, by_part
from gradwire.config import Config
from gradwire.errors import StateError, one_line
from gradwire.state.saved.check import check_numbers, check_sizes, check_tensors
from gradwire.state.saved.pending import fold_moved, pack_pending, unpack_pending

if TYPE_CHECKING:
    from gradwire.accumulate import Bundle
    from gradwire.state.state import State

_VERSION = 1
"""Version of the dictionary."""


@torch.no_grad()
def pack_state(state: "State") -> dict[str, Any]:
    """Return the value of `State.state_dict`.

    "residual" holds u, before the subtraction of "delivered". "velocity" holds the momentum before
    masking. Both happen in the next step, once it is known if the optimiser took the last one. So
    a step that proves skipped after a resume is put back as it would be without the resume.
    """
    return pack_header(state) | {
        "residual": _by_name(state, [bundle.buffer for bundle in state.bundles]),
        "velocity": _by_name(state, [bundle.velocity for bundle in state.bundles]),
        "delivered": [pack_pending(bundle) for bundle in state.bundles],
    }


def pack_header(state: "State") -> dict[str, Any]:
    """Return all of the saved form but the long vectors."""
    if not state.opened:
        raise StateError("there is nothing to save yet: the parameters are known after a step")
    return {
        "version": _VERSION,
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
        # Deliveries name entries by place, and the place of an entry depends on the strides.
        "strides": {slot.name: list(slot.stride) for b in state.bundles for slot in b.slots},
        # Cloned, because methods change their memory in place.
        "memory": [{k: v.clone().cpu() for k, v in b.memory.items()} for b in state.bundles],
    }


@torch.no_grad()
def unpack_state(state: "State", saved: Mapping[str, Any]) -> None:
    """Check everything, then change `state`; for `State.load_state_dict`."""
    check_state(state, saved)
    check_rank(state, saved)
    resume(state, saved)


def resume(state: "State", saved: Mapping[str, Any]) -> None:
    """Take over a checked state whole, with the last delivery, which is not settled yet."""
    state.restore(saved)
    _take_delivered(state, saved)


def _take_delivered(state: "State", saved: Mapping[str, Any]) -> None:
    """Give every bundle its last delivery, to be settled in the next step."""
    strides = saved.get("strides", {})
    for bundle, delivered in zip(state.bundles, saved["delivered"], strict=True):
        bundle.pending = unpack_pending(delivered, bundle, strides)
    skipped = state.was_skipped()
    for bundle in state.bundles:
        fold_moved(bundle, strides, skipped)


def check_rank(state: "State", saved: Mapping[str, Any]) -> None:
    """Raise StateError for the state of another rank, or of a run of another size."""
    world = (saved["rank"], saved["world_size"])
    if world != (state.group.rank, state.group.size):
        raise StateError(
            f"this state belongs to rank {world[0]} of {world[1]}, this is rank {state.group.rank} "
            f"of {state.group.size}. gradwire.load(wire, folder) can change the number of ranks."
        )


def check_state(state: "State", saved: Mapping[str, Any]) -> None:
    """Raise StateError, naming the first fault, unless `saved` fits this model. Change nothing."""
    # Most programs that import gradwire load nothing.
    from gradwire.state.saved.check_bundles import check_bundles, check_strides

    check_sizes(saved)
    if not isinstance(saved, Mapping) or saved.get("version") != _VERSION:
        version = saved.get("version") if isinstance(saved, Mapping) else type(saved).__name__
        raise StateError(f"state version is {version!r}, this gradwire reads version {_VERSION}")
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
    owned = saved.get("owned", {})
    for field, tensors in (("residual", residual), ("velocity", velocity), ("owned", owned)):
        if tensors:
            check_tensors(field, tensors, wanted)
    check_bundles(saved, wanted, state.config.dense)
    check_strides(saved.get("strides", {}), wanted)
    state.check_more(saved)


def restore(state: "State", saved: Mapping[str, Any]) -> None:
    """Take over bundles, residuals, momentum, memories and counters, but no delivery."""
    homes = {slot.name: slot for bundle in state.bundles for slot in bundle.slots}
    _take_choice(state, saved)
    state.rebundle([assign_offsets([homes[name] for name in names]) for names in saved["bundles"]])
    for bundle, memory in zip(state.bundles, saved["memory"], strict=True):
        for slot in bundle.slots:
            bundle.view(bundle.buffer, slot).copy_(saved["residual"][slot.name])
            if bundle.velocity is not None and saved.get("velocity"):
                bundle.view(bundle.velocity, slot).copy_(saved["velocity"][slot.name])
        bundle.memory.update({k: v.clone().to(state.device) for k, v in memory.items()})
        if saved.get("owned"):
            _take_owned(bundle, saved["owned"])
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
    # Without "skipped", in states of older releases, the scale tells if the step was skipped.
    state.status.resume(
        bool(saved.get("skipped", saved.get("user_skip"))),
        None if "skipped" in saved else state.status.scale,
    )


def _take_owned(bundle: "Bundle", saved: Mapping[str, Tensor]) -> None:
    """Take over what this rank keeps of the mean, saved by parameter and zero in other parts."""
    vector = torch.zeros_like(bundle.u)
    for slot in bundle.slots:
        bundle.view(vector, slot).copy_(saved[slot.name])
    bundle.memory[OWNED] = by_part(vector, bundle.memory.ranks)[bundle.memory.rank].clone()


def _take_choice(state: "State", saved: Mapping[str, Any]) -> None:
    """Take over the config that `method="auto"` had chosen, unless the number of ranks changed."""
    if not _takes_choice(state, saved):
        return
    state.config = Config(**saved["config"])
    state.auto, state.reason = None, saved["reason"]


def _takes_choice(state: "State", saved: Mapping[str, Any]) -> bool:
    """Return True if this run has made no choice yet and the saved choice holds for it."""
    # With another number of ranks another config may be best, so the run measures anew.
    if state.auto is None or saved["world_size"] != state.group.size:
        return False
    return bool(saved.get("reason"))


def _check_choice(state: "State", saved: Mapping[str, Any]) -> None:
    """Raise StateError unless the saved choice of `method="auto"` can be taken over."""
    if not isinstance(saved.get("reason", ""), str):
        raise StateError(f"the state's reason must be words, got {type(saved['reason']).__name__}")
    if _takes_choice(state, saved):
        try:
            Config(**saved["config"])
        except Exception as error:  # a value of any kind may be in it
            raise StateError(f"the state's config cannot be: {one_line(error)}") from error


def _by_name(state: "State", vectors: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Return each parameter's part of its bundle's vector; leave out bundles without a vector."""
    return {
        slot.name: bundle.view(vector, slot).clone().cpu()
        for bundle, vector in zip(state.bundles, vectors, strict=True)
        if vector is not None
        for slot in bundle.slots
    }


def _counts_now(state: "State") -> dict[str, int]:
    """Return the counts that live outside `state._counts` during a run."""
    return {
        "sent": state.entries_sent(),
        "skipped": int(state.status.count),
        "clipped": state._counts["clipped"] + sum(int(b.tally.clipped) for b in state.bundles),
        "length_exchanges": state._counts["length_exchanges"]
        + sum(b.tally.length_exchanges for b in state.bundles),
        "bytes_before": state._counts["bytes_before"] + state.group.bytes_sent,
    }


def settle_saved(state: "State", saved: dict[str, Any]) -> None:
    """Settle the last step of a part, in `saved`, as the next step would have done.

    `state` stays as it is.
    """
    # Only a Bundle can lay out, mask and settle a part.
    bench = _workbench(state)
    restore(bench, saved)
    for bundle in bench.bundles:
        bundle.memory.rank, bundle.memory.ranks = saved["rank"], saved["world_size"]
    _take_delivered(bench, saved)
    skipped = bench.was_skipped()
    for bundle in bench.bundles:
        bundle.settle(skipped)
        # Other ranks will own other parts.
        bundle.fold_owned(skipped)
    saved["residual"] = _by_name(bench, [bundle.buffer for bundle in bench.bundles])
    saved["velocity"] = _by_name(bench, [bundle.velocity for bundle in bench.bundles])
    saved["memory"] = [{k: v for k, v in m.items() if k != OWNED} for m in saved["memory"]]
    # The next step does not count a step that is settled here.
    saved["counts"] = dict(saved["counts"])
    saved["counts"]["skipped"] = saved["counts"].get("skipped", 0) + int(skipped)
    saved["user_skip"] = saved["skipped"] = False


def _workbench(state: "State") -> "State":
    """Return a copy of a State that can be restored without a change of the original."""
    bench = object.__new__(type(state))
    bench.__dict__.update(state.__dict__)
    bench._counts = Counter()
    bench.lr = LrTracker()
    bench.status = copy.copy(state.status)
    bench.status.count = state.status.count.clone()
    if bench.status.optimizer_watch is not None:
        bench.status.optimizer_watch = copy.copy(bench.status.optimizer_watch)
        bench.status.optimizer_watch.stepped = bench.status.optimizer_watch.stepped.clone()
    return bench
