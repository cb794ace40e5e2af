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

from gradwire.errors import ExchangeError, StateError
from gradwire.packing import VERSION, check, settle_saved

if TYPE_CHECKING:
    from gradwire.state import State

MANIFEST = "gradwire.json"


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

    With another number of ranks every rank starts from the mean of the saved residuals and of the
    saved momentum, which leaves nothing out: the mean over the new ranks is the mean over the old.
    Likewise the weights of local steps; their optimiser and buffers are then rank 0's.
    """
    path = Path(folder)
    manifest = read_manifest(path)
    parts, size = manifest["parts"], manifest["world_size"]
    if size == state.group.size:
        state.load_state_dict(_read(path, parts[state.group.rank]))
        return
    mean: dict[tuple[str, str], Tensor] = {}
    first: dict[str, Any] = {}
    for part in parts:
        saved = _read(path, part)
        check(state, saved)
        settle_saved(state, saved)
        first = first or saved
        for what in state.averaged:
            for name, tensor in saved[what].items():
                share = tensor.double() / size
                mean[what, name] = mean[what, name] + share if (what, name) in mean else share
    for (what, name), tensor in mean.items():
        first[what][name] = tensor.float()
    state.restore(first)


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
