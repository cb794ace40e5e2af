"""gradwire.json, the list of a checkpoint folder's files, guarded by its own sha256."""

import gc
import hashlib
import json
import re
import secrets
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwire.errors import ConfigError, StateError, one_line
from gradwire.ranks.group import Group, uncounted
from gradwire.ranks.together import gather_words
from gradwire.state.saved.files import replace_file

if TYPE_CHECKING:
    from gradwire.state.state import State

MANIFEST = "gradwire.json"
_VERSION = 2
"""Version of the folder; each state in it has its own. Version 1 did not guard the manifest."""

_known: "weakref.WeakSet[State]" = weakref.WeakSet()
"""Wires of this process that have an identity, and so perhaps a checkpoint."""


def adopt_identity(state: "State", groups: Sequence[Group]) -> None:
    """Give the wire rank 0's identity, or a new one if rank 0 has none. A collective call.

    The identity stands in the manifest and in every part, so that parts of two wires never mix.
    """
    state.identity = state.identity or secrets.token_hex(8)
    for group in groups:
        with uncounted(group):
            state.identity = gather_words(group, state.identity)[0]
    _known.add(state)


def note_identity(state: "State", identity: str) -> None:
    """Give the wire the identity of the checkpoint that was loaded, "" for none.

    An identity that another wire in use has stays with that one: two wires with one identity would
    delete each other's checkpoints.
    """
    if identity and not _is_in_use(identity, state):
        state.identity = identity
        _known.add(state)


def _is_in_use(identity: str, state: "State") -> bool:
    """Return True if another wire of this process that is not closed has this identity."""

    def found() -> bool:
        others = [wire for wire in _known if wire is not state and not wire.stopped]
        return any(wire.identity == identity for wire in others)

    if found():
        # A wire that was dropped may wait in a cycle of references.
        gc.collect()
    return found()


def refuse_other(state: "State", path: Path) -> None:
    """Raise ConfigError if the folder holds the checkpoint of another wire that is in use."""
    try:
        identity = read_manifest(path).get("run")
    except (StateError, OSError):
        return
    if identity != state.identity and _is_in_use(str(identity), state):
        raise ConfigError(
            f"{path} holds the checkpoint of another wire of this run, which this one would "
            f"delete: give each wire a folder of its own, or close the other wire first"
        )


def write_manifest(path: Path, content: Mapping[str, Any]) -> None:
    """Replace the folder's manifest in one go."""
    manifest = {"version": _VERSION, **content}
    manifest["sha256"] = seal(manifest)
    replace_file(path / MANIFEST, lambda out: out.write(json.dumps(manifest, indent=1).encode()))


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint folder, checked."""
    file = path / MANIFEST
    refuse_pipe(file)
    try:
        manifest = json.loads(file.read_bytes())
        sealed = isinstance(manifest, dict) and manifest.get("sha256") == seal(manifest)
    except FileNotFoundError:
        left = "; parts without it are of a save that was broken off" * any(path.glob("*.pt"))
        raise StateError(f"{path} holds no checkpoint: {MANIFEST} is not there{left}") from None
    except (ValueError, RecursionError) as error:
        raise StateError(f"{file} is damaged: {one_line(error)}") from error
    if not isinstance(manifest, dict) or "version" not in manifest:
        raise StateError(f"{file} is damaged: it says no version")
    if manifest["version"] != _VERSION:
        raise StateError(
            f"{path} has version {manifest['version']!r:.20}, "
            f"this gradwire reads version {_VERSION}"
        )
    if not sealed or not _is_manifest(manifest):
        raise StateError(f"{file} is damaged: its sha256 is not that of its content")
    return manifest


def refuse_pipe(file: Path) -> None:
    """Raise StateError for a path that is no file. A read from a pipe would wait for ever."""
    if file.exists() and not file.is_file():
        raise StateError(f"{file} is not a file")


def seal(manifest: Mapping[str, Any]) -> str:
    """Return the sha256 of all entries but "sha256"."""
    sealed = {k: v for k, v in manifest.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(sealed, sort_keys=True).encode()).hexdigest()


def _is_manifest(manifest: Mapping[str, Any]) -> bool:
    """Return True if `load` finds its entries, and no file name leads out of the folder."""
    if not isinstance(manifest.get("run", ""), str):
        return False
    files = manifest.get("files")
    if files is not None:
        # A sharded model's manifest. With parts beside files, the parts would go unchecked.
        return (
            "parts" not in manifest
            and isinstance(files, dict)
            and all(
                isinstance(digest, str) and not {"/", "\\"} & set(name)
                for name, digest in files.items()
            )
        )
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
