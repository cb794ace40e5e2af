"""Saving and loading what the ranks remember.

A folder holds one part a rank and a manifest that names them. Parts are written beside the old ones
under new names and the manifest is replaced last, so the folder always holds one whole checkpoint.
The manifest has the sha256 of every part and of itself: a bit that flips anywhere is found.
"""

import contextlib
import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire.errors import ConfigError, ExchangeError, GradwireError, StateError, one_line
from gradwire.ranks.group import uncounted
from gradwire.ranks.together import gather_words, raise_together
from gradwire.state.saved.files import replace
from gradwire.state.saved.manifest import (
    MANIFEST,
    adopt_identity,
    note_identity,
    read_manifest,
    refuse_other,
    refuse_pipe,
    write_manifest,
)
from gradwire.state.saved.plain import IN_COMMON, check, check_rank, in_common, settle_saved

if TYPE_CHECKING:
    from gradwire.state.state import State


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
        from gradwire.state.saved import sharded

        sharded.save(state, path)
        return
    rank = state.group.rank
    with uncounted(state.group):
        state.group.agree("save", steps=state.steps)
    adopt_identity(state, [state.group])
    new = path / f"gradwire-step{state.steps}-rank{rank}.pt.new"
    failure: Exception | None = None
    digest = bytes(32)
    written: Path | None = None
    is_new = False
    try:
        refuse_other(state, path)
        path.mkdir(parents=True, exist_ok=True)
        digest = replace(new, lambda out: torch.save(state.state_dict(), out))
        written = path / _part(state.steps, rank, digest.hex())
        is_new = not written.exists()
        os.replace(new, written)
    except ConfigError as error:
        failure = error
    except Exception as error:  # of whatever kind: the others wait
        failure = _refusal(rank, new, error)
        with contextlib.suppress(OSError):
            new.unlink()
    try:
        digests = _gather_digests(state, digest, failure)
    except GradwireError:
        _drop(path, written if is_new else None)
        raise
    parts = [
        {"file": _part(state.steps, r, digest), "sha256": digest}
        for r, digest in enumerate(digests)
    ]
    try:
        # Every rank writes the same bytes: on several machines each then has a manifest of its own.
        about = {"world_size": state.group.size, "steps": state.steps, "run": state.identity}
        write_manifest(path, about | {"parts": parts})
    except Exception as error:
        failure = _refusal(rank, path / MANIFEST, error)
    try:
        _gather_digests(state, bytes(32), failure)
    except GradwireError:
        _drop(path, written if is_new else None)
        raise
    # Now every rank has its manifest: what else has such a name is old, or of a rank that died.
    names = (f"gradwire-step*-rank{rank}.pt*", f"gradwire-step*-rank{rank}-*", f"{MANIFEST}.*")
    for old in [file for name in names for file in path.glob(name)]:
        if old.name != parts[rank]["file"]:
            old.unlink(missing_ok=True)


def _drop(path: Path, part: Path | None) -> None:
    """Delete a part that no manifest names: a loop that tries again must not fill the disk."""
    if part is None:
        return
    try:
        named = {one["file"] for one in read_manifest(path).get("parts", ())}
    except (StateError, OSError):
        named = set()
    if part.name not in named:
        with contextlib.suppress(OSError):
            part.unlink()


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
        from gradwire.state.saved import sharded

        sharded.load(state, path)
        return
    with uncounted(state.group):
        state.group.agree("load")
    manifest: dict[str, Any] = {}
    mine: dict[str, Any] = {}
    shared: list[str] = []
    failure: GradwireError | None = None
    try:
        manifest = read_manifest(path)
        mine, shared = _read_checked(state, path, manifest)
    except StateError as error:
        failure = error
    except OSError as error:
        failure = StateError(f"{error.filename or path} cannot be read: {error.strerror}")
    except Exception as error:  # of whatever kind: the others wait
        failure = StateError(f"{path} cannot be read: {one_line(error)}")
        failure.__cause__ = error
    raise_together(state.group, failure, StateError)
    _compare(state, path, [manifest["sha256"], *shared])
    if mine:
        state.load_state_dict(mine)
    else:
        _merge(state, path, manifest["parts"])
    note_identity(state, manifest.get("run", ""))


def _read_checked(
    state: "State", path: Path, manifest: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """This rank's part, and the digests of what it has to have in common with those of others.

    No part where the number of ranks differs; then all parts are checked.
    """
    if "parts" not in manifest:
        raise StateError(f"{path} is of a model that is sharded by fully_shard")
    size = manifest["world_size"]
    numbers = [state.group.rank] if size == state.group.size else range(size)
    digests: list[list[str]] = []
    for number in numbers:
        part = manifest["parts"][number]
        saved = _read(path, part)
        try:
            check(state, saved)
            if size == state.group.size:
                check_rank(state, saved)
            for field in ("run", "steps"):
                if field in manifest and saved.get(field) != manifest[field]:
                    raise StateError(
                        f"its {field} is {saved.get(field)!r:.40}, that of {MANIFEST} "
                        f"{manifest[field]!r:.40}: it is of another checkpoint"
                    )
            digests.append(in_common(saved))
            if what := _differs(digests[0], digests[-1]):
                raise StateError(f"its {what} is not that of rank 0's part")
        except StateError as error:
            raise StateError(f"{path / part['file']}: {error}") from error
        except Exception as error:  # of values that nobody thought of
            raise StateError(f"{path / part['file']}: {one_line(error)}") from error
    return (saved if size == state.group.size else {}), digests[0]


def _differs(first: Sequence[str], other: Sequence[str]) -> str:
    """What two parts of one checkpoint do not have in common; nothing where they fit."""
    pairs = zip(IN_COMMON, first, other, strict=True)
    return next((name for name, a, b in pairs if a != b), "")


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


def _compare(state: "State", path: Path, found: Sequence[str]) -> None:
    """Raises on every rank unless all have read the same manifest and parts that fit together."""
    rows = gather_words(state.group, found)
    for rank, other in enumerate(rows):
        if other[0] != rows[0][0]:
            raise StateError(
                f"{path}: rank {rank} holds another checkpoint than rank 0. Copy one to all."
            )
        if what := _differs(rows[0][1:], other[1:]):
            raise StateError(
                f"{path}: the parts of ranks 0 and {rank} differ in their {what}: they are not of "
                f"one checkpoint"
            )


def _refusal(rank: int, file: Path, error: Exception) -> ExchangeError:
    why = error.strerror if isinstance(error, OSError) else one_line(error)
    words = f"rank {rank} could not write {file}: {why}. The last checkpoint is untouched"
    refusal = ExchangeError(words)
    refusal.__cause__ = error
    return refusal


def _read(path: Path, part: Mapping[str, str]) -> dict[str, Any]:
    file = path / part["file"]
    refuse_pipe(file)
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
