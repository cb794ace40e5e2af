"""`gradwire.save` and `gradwire.load`: the checkpoint folder of all ranks.

A folder holds one part per rank and a manifest that names the parts. New parts have new names and
the manifest is replaced last, so the folder always holds one whole checkpoint. The manifest has the
sha256 of every part and of itself, so a flipped bit anywhere is found.
"""

import contextlib
import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from gradwire.errors import ConfigError, ExchangeError, GradwireError, StateError, one_line
from gradwire.ranks.group import uncounted
from gradwire.ranks.together import gather_words, raise_together
from gradwire.state.saved.files import replace_file
from gradwire.state.saved.manifest import (
    MANIFEST,
    adopt_identity,
    note_identity,
    read_manifest,
    refuse_other,
    refuse_pipe,
    write_manifest,
)
from gradwire.state.saved.plain import (
    IN_COMMON,
    check_rank,
    check_state,
    common_digests,
    resume,
    settle_saved,
)

if TYPE_CHECKING:
    from gradwire.integrate.fsdp import ShardedWire
    from gradwire.state.state import State


def save(state: "State", folder: str | os.PathLike[str]) -> None:
    """Write every rank's part and the manifest. A collective call.

    Atomic: until the manifest is replaced, the folder holds the checkpoint that it held before. A
    sharded model's folder is one of torch.distributed.checkpoint, and holds one checkpoint.
    """
    _check_wire(state, "save")
    if not state.opened:
        raise StateError("there is nothing to save yet: the parameters are known after a step")
    path = Path(folder)
    if state.sharded:
        from gradwire.state.saved import sharded

        sharded.save(cast("ShardedWire", state), path)
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
        digest = replace_file(new, lambda out: torch.save(state.state_dict(), out))
        written = path / _part_name(state.steps, rank, digest.hex())
        is_new = not written.exists()
        os.replace(new, written)
    except ConfigError as error:
        failure = error
    except Exception as error:  # any kind, because the other ranks wait for this one
        failure = _refusal(rank, new, error)
        with contextlib.suppress(OSError):
            new.unlink()
    try:
        digests = _gather_digests(state, digest, failure)
    except GradwireError:
        _drop(path, written if is_new else None)
        raise
    parts = [
        {"file": _part_name(state.steps, r, digest), "sha256": digest}
        for r, digest in enumerate(digests)
    ]
    try:
        # Every rank writes the same bytes, so that each of several machines has a manifest.
        about = {"world_size": state.group.size, "steps": state.steps, "run": state.identity}
        write_manifest(path, about | {"parts": parts})
    except Exception as error:
        failure = _refusal(rank, path / MANIFEST, error)
    try:
        _gather_digests(state, bytes(32), failure)
    except GradwireError:
        _drop(path, written if is_new else None)
        raise
    # Every rank has its manifest now. Other files of such names are old, or of a rank that died.
    names = (f"gradwire-step*-rank{rank}.pt*", f"gradwire-step*-rank{rank}-*", f"{MANIFEST}.*")
    for old in [file for name in names for file in path.glob(name)]:
        if old.name != parts[rank]["file"]:
            old.unlink(missing_ok=True)


def _drop(path: Path, part: Path | None) -> None:
    """Delete a part that no manifest names, or a loop that saves again would fill the disk."""
    if part is None:
        return
    try:
        named = {entry["file"] for entry in read_manifest(path).get("parts", ())}
    except (StateError, OSError):
        named = set()
    if part.name not in named:
        with contextlib.suppress(OSError):
            part.unlink()


def _check_wire(wire: Any, operation: str) -> None:
    if not hasattr(wire, "opened"):
        raise ConfigError(
            f"{operation} takes the wire that attach returned, got {type(wire).__name__}"
        )


def _part_name(steps: int, rank: int, digest: str) -> str:
    """Return a file name for this content alone.

    A second save of the same step must not overwrite the parts of the first.
    """
    return f"gradwire-step{steps}-rank{rank}-{digest[:8]}.pt"


def load(state: "State", folder: str | os.PathLike[str]) -> None:
    """Continue from a folder written by `save`. A collective call.

    Everything is checked before anything is changed. A fault on one rank is an error on every rank.

    The number of ranks may change. Then every rank starts from the mean of the saved residuals and
    of the saved momentum. Nothing is lost, because the mean over the new ranks is the mean over the
    old ones. Replicas of a sharded model may change in number likewise, and so may its shards. With
    local steps the weights are averaged too, and optimiser and buffers are rank 0's.
    """
    _check_wire(state, "load")
    if not state.opened:
        raise StateError("load after attach, or after a step: the parameters are not known yet")
    path = Path(folder)
    if state.sharded:
        from gradwire.state.saved import sharded

        sharded.load(cast("ShardedWire", state), path)
        return
    with uncounted(state.group):
        state.group.agree("load")
    manifest: dict[str, Any] = {}
    part: dict[str, Any] = {}
    digests: list[str] = []
    failure: GradwireError | None = None
    try:
        manifest = read_manifest(path)
        part, digests = _read_checked(state, path, manifest)
    except StateError as error:
        failure = error
    except OSError as error:
        failure = StateError(f"{error.filename or path} cannot be read: {error.strerror}")
    except Exception as error:  # any kind, because the other ranks wait for this one
        failure = StateError(f"{path} cannot be read: {one_line(error)}")
        failure.__cause__ = error
    raise_together(state.group, failure, StateError)
    _compare(state, path, [manifest["sha256"], *digests])
    if part:
        # Not `state.load_state_dict`, which would check every tensor of the part once more.
        resume(state, part)
    else:
        _merge(state, path, manifest["parts"])
    note_identity(state, manifest.get("run", ""))


def _read_checked(
    state: "State", path: Path, manifest: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return this rank's part, checked, and the digests that it shares with all other parts.

    When the number of ranks has changed, check all parts and return an empty part.
    """
    if "parts" not in manifest:
        raise StateError(f"{path} is of a model that is sharded by fully_shard")
    size = manifest["world_size"]
    numbers = [state.group.rank] if size == state.group.size else range(size)
    digests: list[list[str]] = []
    for number in numbers:
        part = manifest["parts"][number]
        saved = _read_part(path, part)
        try:
            check_state(state, saved)
            if size == state.group.size:
                check_rank(state, saved)
            for field in ("run", "steps"):
                if field in manifest and saved.get(field) != manifest[field]:
                    raise StateError(
                        f"its {field} is {saved.get(field)!r:.40}, that of {MANIFEST} "
                        f"{manifest[field]!r:.40}: it is of another checkpoint"
                    )
            digests.append(common_digests(saved))
            if field := _first_difference(digests[0], digests[-1]):
                raise StateError(f"its {field} is not that of rank 0's part")
        except StateError as error:
            raise StateError(f"{path / part['file']}: {error}") from error
        except Exception as error:  # a value of a kind that no check expected
            raise StateError(f"{path / part['file']}: {one_line(error)}") from error
    return (saved if size == state.group.size else {}), digests[0]


def _first_difference(first: Sequence[str], other: Sequence[str]) -> str:
    """Return the first of IN_COMMON in which two parts differ, "" if the parts fit together."""
    pairs = zip(IN_COMMON, first, other, strict=True)
    return next((name for name, a, b in pairs if a != b), "")


def _merge(state: "State", path: Path, parts: Sequence[Mapping[str, str]]) -> None:
    """Continue from the mean of all parts, which another number of ranks wrote.

    Reads every part again, because memory may not hold all parts at once.
    """
    mean: dict[tuple[str, str], Tensor] = {}
    first: dict[str, Any] = {}
    for part in parts:
        # Each part passes through the live State. An error here would leave the State changed, but
        # all parts were read and checked a moment ago.
        saved = _read_part(path, part)
        settle_saved(state, saved)
        first = first or saved
        for field in state.averaged:
            for name, tensor in saved[field].items():
                share = tensor.double() / len(parts)
                mean[field, name] = mean[field, name] + share if (field, name) in mean else share
    for (field, name), tensor in mean.items():
        first[field][name] = tensor.float()
    state.restore(first)


def _compare(state: "State", path: Path, digests: Sequence[str]) -> None:
    """Raise on every rank unless all have read the same manifest and parts that fit together.

    digests: the manifest's, then the part's.
    """
    rows = gather_words(state.group, digests)
    for rank, other in enumerate(rows):
        if other[0] != rows[0][0]:
            raise StateError(
                f"{path}: rank {rank} holds another checkpoint than rank 0. Copy one to all."
            )
        if field := _first_difference(rows[0][1:], other[1:]):
            raise StateError(
                f"{path}: the parts of ranks 0 and {rank} differ in their {field}: they are not of "
                f"one checkpoint"
            )


def _refusal(rank: int, file: Path, error: Exception) -> ExchangeError:
    why = error.strerror if isinstance(error, OSError) else one_line(error)
    words = f"rank {rank} could not write {file}: {why}. The last checkpoint is untouched"
    refusal = ExchangeError(words)
    refusal.__cause__ = error
    return refusal


def _read_part(path: Path, part: Mapping[str, str]) -> dict[str, Any]:
    """Return one rank's part, after its sha256 was checked."""
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
    """Return every rank's digest; raise on every rank if one of them failed."""
    flag = 1 if failure else 0
    row = torch.tensor([flag, *digest], dtype=torch.uint8, device=state.device)
    with uncounted(state.group):
        rows = state.group.all_gather(row).cpu()
    failed = [r for r, row in enumerate(rows) if int(row[0])]
    if failed:
        raise failure or ExchangeError(f"the checkpoint was not written: rank {failed[0]} failed")
    return [bytes(row[1:].tolist()).hex() for row in rows]
