"""Saving and loading what the ranks remember.

A folder holds one part a rank and a manifest that names them. Parts are written beside the old ones
under new names and the manifest is replaced last, so the folder always holds one whole checkpoint.
The manifest has the sha256 of every part and of itself: a bit that flips anywhere is found.
"""

import hashlib
import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire.cluster.gossip import fail_together, gather_words
from gradwire.cluster.group import uncounted
from gradwire.errors import ConfigError, ExchangeError, StateError, one_line
from gradwire.files import replace
from gradwire.packing import check, check_rank, settle_saved

if TYPE_CHECKING:
    from gradwire.state import State

MANIFEST = "gradwire.json"
VERSION = 2
"""Of the folder; the states in it have one of their own. Version 1 did not guard the manifest."""


def save(state: "State", folder: str | os.PathLike[str]) -> None:
    """Write every rank's part and the manifest. A collective call.

    Atomic: until the manifest is replaced, the folder holds the checkpoint it held before. For a
    sharded model it is a folder of torch.distributed.checkpoint, one a checkpoint.
    """
    _check_wire(state, "save")
    if not state.opened:
        raise StateError("there is nothing to save yet: the parameters are known after a step")
    path = Path(folder)
    if state.sharded:
        from gradwire import sharded

        sharded.save(state, path)
        return
    rank, size = state.group.rank, state.group.size
    new = path / f"gradwire-step{state.steps}-rank{rank}.pt.new"
    failure: Exception | None = None
    digest = bytes(32)
    try:
        path.mkdir(parents=True, exist_ok=True)
        digest = replace(new, lambda out: torch.save(state.state_dict(), out))
        os.replace(new, path / _part(state.steps, rank, digest.hex()))
    except Exception as error:  # of whatever kind: the others wait
        failure = _refusal(rank, new, error)
    digests = _gather_digests(state, digest, failure)
    parts = [
        {"file": _part(state.steps, r, digest), "sha256": digest}
        for r, digest in enumerate(digests)
    ]
    manifest = {"version": VERSION, "world_size": size, "steps": state.steps, "parts": parts}
    # Every rank writes the same bytes: on several machines each then has a manifest of its own.
    manifest["sha256"] = _seal(manifest)
    try:
        replace(path / MANIFEST, lambda out: out.write(json.dumps(manifest, indent=1).encode()))
    except Exception as error:
        failure = _refusal(rank, path / MANIFEST, error)
    _gather_digests(state, bytes(32), failure)
    # Now every rank has its manifest: what else has such a name is old, or of a rank that died.
    names = (f"gradwire-step*-rank{rank}.pt*", f"gradwire-step*-rank{rank}-*", f"{MANIFEST}.*")
    for old in [file for name in names for file in path.glob(name)]:
        if old.name != parts[rank]["file"]:
            old.unlink(missing_ok=True)


def _check_wire(given: Any, what: str) -> None:
    if not hasattr(given, "opened"):
        raise ConfigError(f"{what} takes the wire that attach returned, got {type(given).__name__}")


def _part(steps: int, rank: int, digest: str) -> str:
    """A name that no other content has: a second save of the same step must not touch the first."""
    return f"gradwire-step{steps}-rank{rank}-{digest[:8]}.pt"


def load(state: "State", folder: str | os.PathLike[str]) -> None:
    """Continue from a folder written by `save`. A collective call.

    Everything is checked before anything is changed, and what is wrong on one rank is an error on
    every rank. With another number of ranks every rank starts from the mean of the saved residuals
    and of the saved momentum, which leaves nothing out: the mean over the new ranks is the mean
    over the old; likewise the replicas of a sharded model, whose number of shards may change too,
    and the weights of local steps, whose optimiser and buffers are then rank 0's.
    """
    _check_wire(state, "load")
    if not state.opened:
        raise StateError("load after attach, or after a step: the parameters are not known yet")
    path = Path(folder)
    if state.sharded:
        from gradwire import sharded

        sharded.load(state, path)
        return
    manifest: dict[str, Any] = {}
    mine: dict[str, Any] = {}
    failure = None
    try:
        manifest = read_manifest(path)
        mine = _read_checked(state, path, manifest)
    except StateError as error:
        failure = error
    except OSError as error:
        failure = StateError(f"{error.filename or path} cannot be read: {error.strerror}")
    except Exception as error:  # of whatever kind: the others wait
        failure = StateError(f"{path} cannot be read: {one_line(error)}")
        failure.__cause__ = error
    fail_together(state.group, failure, StateError, state.device)
    _compare_seals(state, path, manifest["sha256"])
    if mine:
        state.load_state_dict(mine)
    else:
        _merge(state, path, manifest["parts"])


def _read_checked(state: "State", path: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part; nothing where the number of ranks differs, then all parts are checked."""
    size = manifest["world_size"]
    numbers = [state.group.rank] if size == state.group.size else range(size)
    for number in numbers:
        part = manifest["parts"][number]
        saved = _read(path, part)
        try:
            check(state, saved)
            if size == state.group.size:
                check_rank(state, saved)
        except StateError as error:
            raise StateError(f"{path / part['file']}: {error}") from error
    return saved if size == state.group.size else {}


def _merge(state: "State", path: Path, parts: Sequence[Mapping[str, str]]) -> None:
    mean: dict[tuple[str, str], Tensor] = {}
    first: dict[str, Any] = {}
    for part in parts:
        saved = _read(path, part)
        settle_saved(state, saved)
        first = first or saved
        for what in state.averaged:
            for name, tensor in saved[what].items():
                share = tensor.double() / len(parts)
                mean[what, name] = mean[what, name] + share if (what, name) in mean else share
    for (what, name), tensor in mean.items():
        first[what][name] = tensor.float()
    state.restore(first)


def _compare_seals(state: "State", path: Path, seal: str) -> None:
    """Raises on every rank unless all have read the same manifest."""
    seals = gather_words(state.group, seal, state.device)
    for rank, other in enumerate(seals):
        if other != seals[0]:
            raise StateError(
                f"{path}: rank {rank} holds another checkpoint than rank 0. Copy one to all."
            )


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder, checked."""
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
    except FileNotFoundError:
        left = "; parts without it are of a save that was broken off" * any(path.glob("*.pt"))
        raise StateError(f"{path} holds no checkpoint: {MANIFEST} is not there{left}") from None
    except (ValueError, RecursionError) as error:
        raise StateError(f"{file} is damaged: {one_line(error)}") from error
    if not isinstance(manifest, dict) or "version" not in manifest:
        raise StateError(f"{file} is damaged: it says no version")
    if manifest["version"] != VERSION:
        raise StateError(
            f"{path} has version {manifest['version']!r:.20}, this gradwire reads version {VERSION}"
        )
    seal = manifest.get("sha256")
    if seal != _seal(manifest) or not _is_manifest(manifest):
        raise StateError(f"{file} is damaged: its sha256 is not that of its content")
    return manifest


def _seal(manifest: Mapping[str, Any]) -> str:
    """The sha256 of the other entries."""
    rest = {k: v for k, v in manifest.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _is_manifest(manifest: Mapping[str, Any]) -> bool:
    """Whether what `load` uses is there; a name must not lead out of the folder."""
    parts, size = manifest.get("parts"), manifest.get("world_size")
    return (
        isinstance(parts, list)
        and len(parts) == size
        and size > 0
        and all(
            isinstance(part, dict)
            and re.fullmatch(r"gradwire-step\d+-rank\d+(-[0-9a-f]{8})?\.pt", str(part.get("file")))
            and isinstance(part.get("sha256"), str)
            for part in parts
        )
    )


def _refusal(rank: int, file: Path, error: Exception) -> ExchangeError:
    why = error.strerror if isinstance(error, OSError) else one_line(error)
    words = f"rank {rank} could not write {file}: {why}. The last checkpoint is untouched"
    refusal = ExchangeError(words)
    refusal.__cause__ = error
    return refusal


def _read(path: Path, part: Mapping[str, str]) -> dict[str, Any]:
    file = path / part["file"]
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise StateError(f"{file} is missing: copy every rank's part into the folder") from None
    if hashlib.sha256(content).hexdigest() != part["sha256"]:
        raise StateError(f"{file} is damaged: its sha256 is not the one in {MANIFEST}")
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        raise StateError(f"{file} is no state: {one_line(error)}") from error


def _gather_digests(state: "State", digest: bytes, failure: Exception | None) -> list[str]:
    """Every rank's digest; raises on every rank when one of them failed."""
    flag = 1 if failure else 0
    mine = torch.tensor([flag, *digest], dtype=torch.uint8, device=state.device)
    with uncounted(state.group):
        rows = state.group.all_gather(mine).cpu()
    failed = [r for r, row in enumerate(rows) if int(row[0])]
    if failed:
        raise failure or ExchangeError(f"the checkpoint was not written: rank {failed[0]} failed")
    return [bytes(row[1:].tolist()).hex() for row in rows]
