"""Saving a folder of parts, one per rank, and a manifest that names them.

New parts have new names and the manifest is replaced last, so the folder always holds one whole
checkpoint. The manifest has the sha256 of every part and of itself, so a flipped bit anywhere is
found.
"""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gradwire.errors import ConfigError, ExchangeError, one_line
from gradwire.ranks.group import uncounted
from gradwire.state.saved.draft import Draft
from gradwire.state.saved.files import replace_file
from gradwire.state.saved.manifest import MANIFEST, adopt_identity, refuse_other, write_manifest

if TYPE_CHECKING:
    from gradwire.state.state import State

_OWNER = re.compile(r"gradwire-step\d+-rank(\d+)\b|gradwire\.json\.")
"""The rank of a part, and the temporary files of the manifest, which may be of any rank."""


def save_parts(state: "State", path: Path) -> None:
    """Save as `gradwire.save` does. A collective call."""
    rank = state.group.rank
    draft = Draft(path, rank, [MANIFEST])
    with uncounted(state.group):
        state.group.agree("save", steps=state.steps)
    adopt_identity(state, [state.group])
    parts = _write(state, draft)
    draft.complete()
    # Every rank has its manifest now. Other files of such names are old, or of a rank that died.
    for old in path.glob("gradwire*"):
        owner = _OWNER.match(old.name)
        if owner is None or old.name in parts:
            continue
        # A run with fewer ranks than before deletes the parts of the others too.
        if owner[1] is None or int(owner[1]) == rank or int(owner[1]) >= state.group.size:
            old.unlink(missing_ok=True)


def _write(state: "State", draft: Draft) -> set[str]:
    """Write this rank's part, then the manifest; return the names of all parts.

    A collective call. An error on one rank is an error on every rank.
    """
    rank, path = state.group.rank, draft.folder
    failure: BaseException | None = None
    digest = bytes(32)
    new = path / f"gradwire-step{state.steps}-rank{rank}.pt.new"
    try:
        refuse_other(state, path)
        draft.begin()
        draft.new.append(new)
        digest = replace_file(new, lambda out: torch.save(state.state_dict(), out))
        part = path / _part_name(state.steps, rank, digest.hex())
        if not part.exists():
            draft.new.append(part)
        os.replace(new, part)
    except BaseException as error:  # any kind, because the other ranks wait for this one
        failure = _refusal(rank, new, error)
    digests = _gather_digests(state, draft, digest, failure)
    parts = [
        {"file": _part_name(state.steps, r, digest), "sha256": digest}
        for r, digest in enumerate(digests)
    ]
    try:
        # Every rank writes the same bytes, so that each of several machines has a manifest.
        about = {"world_size": state.group.size, "steps": state.steps, "run": state.identity}
        write_manifest(path, about | {"parts": parts})
    except BaseException as error:
        failure = _refusal(rank, path / MANIFEST, error)
    _gather_digests(state, draft, bytes(32), failure)
    return {part["file"] for part in parts}


def _part_name(steps: int, rank: int, digest: str) -> str:
    """Return a file name for this content alone.

    A second save of the same step must not overwrite the parts of the first.
    """
    return f"gradwire-step{steps}-rank{rank}-{digest[:8]}.pt"


def _refusal(rank: int, file: Path, error: BaseException) -> BaseException:
    """Return the error that this rank raises once the other ranks know of it."""
    if isinstance(error, ConfigError) or not isinstance(error, Exception):
        return error
    why = error.strerror if isinstance(error, OSError) else one_line(error)
    words = f"rank {rank} could not write {file}: {why}. The last checkpoint is untouched"
    refusal = ExchangeError(words)
    refusal.__cause__ = error
    return refusal


def _gather_digests(
    state: "State", draft: Draft, digest: bytes, failure: BaseException | None
) -> list[str]:
    """Return every rank's digest; undo the draft and raise on every rank if one of them failed."""
    flag = 1 if failure else 0
    row = torch.tensor([flag, *digest], dtype=torch.uint8, device=state.device)
    with uncounted(state.group):
        rows = state.group.all_gather(row).cpu()
    failed = [r for r, row in enumerate(rows) if int(row[0])]
    if failed:
        draft.undo()
        raise failure or ExchangeError(f"the checkpoint was not written: rank {failed[0]} failed")
    return [bytes(row[1:].tolist()).hex() for row in rows]
