"""Loading a folder of parts: read and check everything, compare with the others, then change."""

import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire.errors import GradwireError, StateError, one_line
from gradwire.ranks.group import uncounted
from gradwire.ranks.together import gather_words, raise_together
from gradwire.state.saved.alike import IN_COMMON, common_digests, compare_digests
from gradwire.state.saved.manifest import MANIFEST, note_identity, read_manifest, refuse_pipe
from gradwire.state.saved.plain import (
    check_rank,
    check_state,
    resume,
    settle_saved,
)

if TYPE_CHECKING:
    from gradwire.state.state import State


def load_parts(state: "State", path: Path) -> None:
    """Load as `gradwire.load` does. A collective call."""
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
    if manifest["world_size"] == state.group.size:
        # Not `state.load_state_dict`, which would check every tensor of the part once more.
        resume(state, part)
    else:
        state.restore(part)
    note_identity(state, manifest.get("run", ""))


def _read_checked(
    state: "State", path: Path, manifest: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return this rank's part, checked, and the digests that it shares with all other parts.

    When the number of ranks has changed, check all parts and return the mean of all.
    """
    if "parts" not in manifest:
        raise StateError(f"{path} is of a model that is sharded by fully_shard")
    size = manifest["world_size"]
    numbers = [state.group.rank] if size == state.group.size else range(size)
    digests: list[list[str]] = []
    mean = _Mean(state.averaged, size)
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
            if size != state.group.size:
                settle_saved(state, saved)
                mean.add(saved)
        except StateError as error:
            raise StateError(f"{path / part['file']}: {error}") from error
        except Exception as error:  # a value of a kind that no check expected
            raise StateError(f"{path / part['file']}: {one_line(error)}") from error
    return (saved if size == state.group.size else mean.part()), digests[0]


def _first_difference(first: Sequence[str], other: Sequence[str]) -> str:
    """Return the first of IN_COMMON in which two parts differ, "" if the parts fit together."""
    pairs = zip(IN_COMMON, first, other, strict=True)
    return next((name for name, a, b in pairs if a != b), "")


class _Mean:
    """The mean of the parts of `size` ranks, which are added one by one: memory may not hold all.

    fields: the entries of a part that are averaged. All others are those of the first part.
    """

    def __init__(self, fields: Sequence[str], size: int) -> None:
        self._fields, self._size = fields, size
        self._first: dict[str, Any] = {}
        self._sums: dict[tuple[str, str], Tensor] = {}

    def add(self, saved: dict[str, Any]) -> None:
        """Add a part, whose last step is settled."""
        self._first = self._first or saved
        for field in self._fields:
            for name, tensor in saved.get(field, {}).items():
                share = tensor.double() / self._size
                self._sums[field, name] = self._sums.get((field, name), 0) + share

    def part(self) -> dict[str, Any]:
        """Return the mean as a part."""
        for (field, name), tensor in self._sums.items():
            self._first[field][name] = tensor.float()
        return self._first


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
    try:
        compare_digests([row[1:] for row in rows])
    except StateError as error:
        raise StateError(f"{path}: {error}") from None


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
