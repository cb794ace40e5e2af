"""Saving and loading what the ranks remember.

A folder holds one part a rank and a manifest that names them. Parts are written beside the old ones
under new names and the manifest is replaced last, so the folder always holds one whole checkpoint.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire.accumulate.layout import place
from gradwire.errors import ExchangeError, StateError
from gradwire.types import Delivered

if TYPE_CHECKING:
    from gradwire.accumulate import Bundle
    from gradwire.state import State

VERSION = 1
MANIFEST = "gradwire.json"


@torch.no_grad()
def state_dict(state: "State") -> dict[str, Any]:
    """See `State.state_dict`.

    "residual" holds u, from which "delivered" is still to be subtracted once it is known that the
    optimiser took the last step; so a step that turns out to be skipped after a resume is put back
    just as it would have been without it.
    """
    if not state.opened:
        raise StateError("there is nothing to save yet: the parameters are known after a step")
    return {
        "version": VERSION,
        "rank": state.group.rank,
        "world_size": state.group.size,
        "steps": state.steps,
        "counts": dict(state._counts) | _counts_now(state),
        "scale": None if state._scale is None else state._scale.cpu(),
        "user_skip": state._user_skip,
        "flush": state._flush,
        "config": state.config.asdict(),
        "bundles": [[slot.name for slot in bundle.slots] for bundle in state.bundles],
        "residual": {
            slot.name: bundle.view(bundle.buffer, slot).clone().cpu()
            for bundle in state.bundles
            for slot in bundle.slots
        },
        "memory": [
            {k: v.clone().cpu() for k, v in bundle.memory.items()} for bundle in state.bundles
        ],
        "delivered": [_pack(bundle) for bundle in state.bundles],
    }


@torch.no_grad()
def load_state_dict(state: "State", saved: Mapping[str, Any]) -> None:
    """See `State.load_state_dict`. Everything is checked before anything is changed."""
    check(state, saved)
    world = (saved["rank"], saved["world_size"])
    if world != (state.group.rank, state.group.size):
        raise StateError(
            f"this state belongs to rank {world[0]} of {world[1]}, this is rank {state.group.rank} "
            f"of {state.group.size}. gradwire.load(wire, folder) can change the number of ranks."
        )
    _restore(state, saved)
    for bundle, delivered in zip(state.bundles, saved["delivered"], strict=True):
        bundle.delivered, bundle.held = _unpack(delivered, state.device)


def check(state: "State", saved: Mapping[str, Any]) -> None:
    """Raises StateError, naming the first thing wrong, unless `saved` belongs to this model."""
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
    for name, slot in wanted.items():
        if tuple(residual[name].shape) != slot.shape:
            shape = tuple(residual[name].shape)
            raise StateError(f"residual of {name!r} has shape {shape}, the model's is {slot.shape}")
    fields = ("rank", "world_size", "steps", "counts", "bundles", "memory", "delivered", "config")
    for field in fields:
        if field not in saved:
            raise StateError(f"the state has no entry {field!r}")
    if sorted(name for names in saved["bundles"] for name in names) != sorted(wanted):
        raise StateError("the bundles of the state do not hold each parameter once")
    if len(saved["memory"]) != len(saved["bundles"]) or len(saved["delivered"]) != len(
        saved["bundles"]
    ):
        raise StateError("the state has another number of bundles than of their memories")


def _restore(state: "State", saved: Mapping[str, Any]) -> None:
    """Take over bundles, residuals, memories and counters."""
    homes = {slot.name: slot for bundle in state.bundles for slot in bundle.slots}
    state.rebundle([place([homes[name] for name in names]) for names in saved["bundles"]])
    for bundle, memory in zip(state.bundles, saved["memory"], strict=True):
        for slot in bundle.slots:
            bundle.view(bundle.buffer, slot).copy_(saved["residual"][slot.name])
        bundle.memory.update({k: v.clone().to(state.device) for k, v in memory.items()})
    state.steps = saved["steps"]
    state._counts.clear()
    state._counts.update(saved["counts"])
    state._counts["bytes_before"] -= state.group.bytes_sent
    state._entries.zero_()
    state._skips.fill_(state._counts.pop("skipped", 0))
    state._user_skip, state._flush = bool(saved.get("user_skip")), bool(saved.get("flush"))
    scale = saved.get("scale")
    state._scale = None if scale is None else scale.to(state.device)


def _counts_now(state: "State") -> dict[str, int]:
    return {
        "sent": state._counts["sent"] + int(state._entries),
        "skipped": int(state._skips),
        "bytes_before": state._counts["bytes_before"] + state.group.bytes_sent,
    }


def _pack(bundle: "Bundle") -> dict[str, Any] | None:
    if bundle.delivered is None:
        return None
    d = bundle.delivered
    tensors = {"ok": d.ok, "indices": d.indices, "values": d.values, "loss": d.loss}
    packed: dict[str, Any] = {k: None if t is None else t.cpu() for k, t in tensors.items()}
    held = [[offset, kept.cpu()] for offset, kept in bundle.held]
    return packed | {"held": held, "forget": d.forget}


def _unpack(
    packed: Mapping[str, Any] | None, device: torch.device
) -> tuple[Delivered | None, list[tuple[int, Tensor]]]:
    if packed is None:
        return None, []
    indices, values, loss = (
        None if packed[k] is None else packed[k].to(device) for k in ("indices", "values", "loss")
    )
    held = [(int(offset), kept.to(device)) for offset, kept in packed["held"]]
    forget = bool(packed.get("forget"))
    return Delivered(packed["ok"].to(device), indices, values, loss, forget), held


# --- all ranks --------------------------------------------------------------------------------


def save(state: "State", folder: str | os.PathLike[str]) -> None:
    """Write every rank's part and the manifest. A collective call.

    Atomic: until the manifest is replaced, the folder holds the checkpoint it held before.
    """
    path = Path(folder)
    rank, size = state.group.rank, state.group.size
    part = f"gradwire-step{state.steps}-rank{rank}.pt"
    failure = ""
    digest = bytes(32)
    try:
        path.mkdir(parents=True, exist_ok=True)
        digest = _write(path / part, state.state_dict())
    except OSError as error:
        failure = f"rank {rank} could not write {path / part}: {error}"
    digests = _gather_digests(state, digest, failure)
    parts = [
        {"file": f"gradwire-step{state.steps}-rank{r}.pt", "sha256": d}
        for r, d in enumerate(digests)
    ]
    manifest = {"version": VERSION, "world_size": size, "steps": state.steps, "parts": parts}
    # Every rank writes the same bytes: on several machines each then has a manifest of its own.
    _replace(path / MANIFEST, json.dumps(manifest, indent=1).encode())
    _gather_digests(state, bytes(32), "")
    for old in path.glob(f"gradwire-step*-rank{rank}.pt"):
        if old.name != part:
            old.unlink(missing_ok=True)


def load(state: "State", folder: str | os.PathLike[str]) -> None:
    """Continue from a folder written by `save`. A collective call.

    With another number of ranks every rank starts from the mean of the saved residuals, which
    leaves nothing out: the mean over the new ranks is the mean over the old.
    """
    path = Path(folder)
    manifest = read_manifest(path)
    parts, size = manifest["parts"], manifest["world_size"]
    if size == state.group.size:
        state.load_state_dict(_read(path, parts[state.group.rank]))
        return
    mean: dict[str, Tensor] = {}
    first: dict[str, Any] = {}
    for part in parts:
        saved = _read(path, part)
        check(state, saved)
        _settle_saved(state, saved)
        first = first or saved
        for name, residual in saved["residual"].items():
            share = residual.double() / size
            mean[name] = mean[name] + share if name in mean else share
    first["residual"] = {name: residual.float() for name, residual in mean.items()}
    _restore(state, first)


def _settle_saved(state: "State", saved: dict[str, Any]) -> None:
    """Subtract what a part has delivered, in place of the step that would have done it."""
    _restore(state, saved)
    for bundle, delivered in zip(state.bundles, saved["delivered"], strict=True):
        bundle.delivered, bundle.held = _unpack(delivered, state.device)
    skipped = state.was_skipped()
    for bundle in state.bundles:
        bundle.settle(skipped)
        for slot in bundle.slots:
            saved["residual"][slot.name] = bundle.view(bundle.buffer, slot).clone().cpu()
    saved["user_skip"] = False


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder, checked."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        version, parts = manifest["version"], manifest["parts"]
    except FileNotFoundError:
        raise StateError(f"{path} holds no checkpoint: {MANIFEST} is not there") from None
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"{path / MANIFEST} is damaged: {error}") from error
    if version != VERSION:
        raise StateError(f"{path} has version {version!r}, this gradwire reads version {VERSION}")
    if len(parts) != manifest.get("world_size"):
        raise StateError(
            f"{path / MANIFEST} names {len(parts)} parts for {manifest.get('world_size')}"
        )
    return manifest


def _write(file: Path, saved: Mapping[str, Any]) -> bytes:
    """Write through a temporary file; returns the sha256 of what was written."""
    temporary = file.with_name(file.name + ".tmp")
    torch.save(saved, temporary)
    digest = hashlib.sha256(temporary.read_bytes()).digest()
    os.replace(temporary, file)
    return digest


def _replace(file: Path, content: bytes) -> None:
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, file)


def _read(path: Path, part: Mapping[str, str]) -> dict[str, Any]:
    file = path / part["file"]
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise StateError(f"{file} is missing: copy every rank's part into the folder") from None
    if hashlib.sha256(content).hexdigest() != part["sha256"]:
        raise StateError(f"{file} is damaged: its sha256 is not the one in {MANIFEST}")
    return torch.load(file, map_location="cpu", weights_only=True)


def _gather_digests(state: "State", digest: bytes, failure: str) -> list[str]:
    """Every rank's digest; raises on every rank when one of them failed."""
    flag = 1 if failure else 0
    mine = torch.tensor([flag, *digest], dtype=torch.uint8, device=state.device)
    rows = state.group.all_gather(mine).cpu()
    failed = [r for r, row in enumerate(rows) if int(row[0])]
    if failed:
        raise ExchangeError(failure or f"the checkpoint was not written: rank {failed[0]} failed")
    return [bytes(row[1:].tolist()).hex() for row in rows]
