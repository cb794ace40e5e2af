"""Checkpoints of a sharded model, as folders of torch.distributed.checkpoint.

A folder holds these entries:

    gradwire.replica<r>.residual.<parameter>     residual of replica r, a DTensor
    gradwire.replica<r>.velocity.<parameter>     its momentum, likewise
    gradwire.replica<r>.shard<s>                 header of one rank, as bytes: no long vectors

Local steps in islands, which are the replicas, save these too:

    gradwire.replica<r>.weights.<parameter>      weights of island r
    gradwire.replica<r>.departures.<parameter>   its weights when an exchange was begun
    gradwire.replica<r>.optimizer.<n>.<key>.<parameter>   moments of its n-th optimiser
    gradwire.shared.reference.<parameter>        x, the same on all islands
    gradwire.shared.outer.<parameter>            outer momentum
    gradwire.shared.update.<parameter>           an update that has not landed yet

The replica is in the key because replicas keep different residuals. Under one key torch would save
one residual for all. `gradwire.save` adds gradwire.json, with the sha256 of each of torch's files.
"""

import contextlib
import hashlib
import io
import math
import re
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from gradwire.accumulate.owned import OWNED
from gradwire.errors import ExchangeError, GradwireError, StateError, one_line
from gradwire.exchange import EXCHANGES
from gradwire.state.saved import plain
from gradwire.state.saved.alike import IN_COMMON, common_digests
from gradwire.state.saved.cuts import ShardedState
from gradwire.state.saved.dcp_reader import (
    METADATA,
    Writer,
    innermost,
    mend_metadata,
)
from gradwire.state.saved.draft import Draft, files_of
from gradwire.state.saved.manifest import (
    MANIFEST,
    adopt_identity,
    note_identity,
    refuse_other,
    write_manifest,
)
from gradwire.state.saved.sharded_folder import (
    SavedFolder,
    check_place,
    checked,
    parse_header,
    part_of,
    tensors_of,
)
from gradwire.state.saved.sharded_ranks import agree_on, gather_over, groups_of, raise_over

_TOP = "gradwire"
_OURS = re.compile(r"__\d+_[0-9a-f]{8}_\d+\.distcp")
"""Names of the data files that `save` writes; those of torch have no word in the middle."""


@torch.no_grad()
def state_dict(wire: ShardedState, guarded: bool = False) -> dict[str, Any]:
    """Return the value of ShardedWire.state_dict, with the last step settled.

    After a resume that step cannot be skipped any more. guarded: True if a manifest is written
    too. Then `load` refuses the folder without its manifest.
    """
    skipped = wire.was_skipped()
    part: dict[str, Any] = {
        "residual": tensors_of(wire, [b.residual(skipped) for b in wire.bundles])
    }
    if wire.config.momentum:
        part["velocity"] = tensors_of(wire, [b.momentum(skipped) for b in wire.bundles])
    if EXCHANGES[wire.config.exchange].owns_parts:
        kept = [b.owned_vector(skipped) if b.keeps_owned else 0 * b.u for b in wire.bundles]
        part["owned"] = tensors_of(wire, kept)
    more = wire.more_saved()
    header = plain.pack_header(wire) | {
        "skipped": False,
        "user_skip": False,
        "delivered": [None] * len(wire.bundles),
        "strides": {},
        "shard": [wire.shard, wire.shards],
        "guarded": guarded,
        **more.header,
    }
    header["counts"]["skipped"] += int(skipped)
    for memory in header["memory"]:
        # By parameter in "owned", so that other shards can read it.
        memory.pop(OWNED, None)
    content = io.BytesIO()
    torch.save(header, content)
    part |= {**more.vectors, f"shard{wire.shard}": content.getvalue()}
    shared = {"shared": dict(more.shared)} if more.shared else {}
    return {f"replica{wire.group.rank}": part, **shared}


def load_state_dict(wire: ShardedState, saved: Mapping[str, Any]) -> None:
    """Check everything, then change `wire`; for ShardedWire.load_state_dict."""
    replica, shard = f"replica{wire.group.rank}", f"shard{wire.shard}"
    part = saved.get(replica, {}) if isinstance(saved, Mapping) else {}
    if shard not in part:
        raise StateError(
            f"the state has no {replica}, {shard}; with another number of replicas or shards use "
            f"gradwire.load(wire, folder)"
        )
    header = parse_header(part[shard])
    check_place(header, wire.group.rank, wire.group.size, wire.shard, wire.shards)
    wire.restore(checked(wire, {**part, **saved.get("shared", {})}, header))


def save(wire: ShardedState, path: Path) -> None:
    """Save as `gradwire.save` does. A collective call of all replicas and shards.

    Files have new names. The files of the last checkpoint go when the new one is whole.
    """
    _refuse_part_of_job(wire)
    rank = dist.get_rank()
    draft = Draft(path, rank, [METADATA, MANIFEST] if rank == 0 else [])
    agree_on(wire, "save")
    adopt_identity(wire, groups_of(wire))
    token = gather_over(wire, secrets.token_hex(4))[0]
    old_files = files_of(path)
    files = _write(wire, draft, token)
    draft.complete()
    # Files of a save that was killed are in no manifest.
    strays = {file.name for file in path.iterdir() if _OURS.fullmatch(file.name)}
    for name in (old_files | strays) - files:
        with contextlib.suppress(OSError):
            (path / name).unlink()


def _refuse_part_of_job(wire: ShardedState) -> None:
    """Raise StateError if the job has ranks without this model; torch would wait for them."""
    ranks, job = math.prod(group.size for group in groups_of(wire)), dist.get_world_size()
    if ranks != job:
        raise StateError(
            f"gradwire.save writes a sharded model with all ranks of the job, and this model is on "
            f"{ranks} of {job}: save wire.state_dict() with a torch.distributed.checkpoint of yours"
        )


def _write(wire: ShardedState, draft: Draft, token: str) -> set[str]:
    """Write all files, then the manifest; return their names. A collective call.

    An error on one rank is an error on every rank.
    """
    path = draft.folder
    failure: BaseException | None = None
    content: dict[str, Any] = {}
    digests: dict[str, str] = {}
    try:
        refuse_other(wire, path)
        if dist.get_rank() == 0:
            mend_metadata(path)
        draft.begin()
        content = state_dict(wire, guarded=True)
    except BaseException as error:  # any kind, because the other ranks wait for this one
        failure = _refusal(path, error)
    raise_over(wire, failure, ExchangeError, draft)
    try:
        with warnings.catch_warnings():
            # torch warns that it may overwrite files, but the new files have new names.
            warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
            dcp.save({_TOP: content}, storage_writer=Writer(path, token))
        digests = _digests(path, token)
    except BaseException as error:
        failure = _refusal(path, error)
    draft.new = [*path.glob(f"__{dist.get_rank()}_{token}_*"), *path.glob(f"{METADATA}.tmp")]
    raise_over(wire, failure, ExchangeError, draft)
    files = {name: value for part in gather_over(wire, digests) for name, value in part.items()}
    if dist.get_rank() == 0:
        try:
            write_manifest(path, {"steps": wire.steps, "run": wire.identity, "files": files})
        except BaseException as error:
            failure = _refusal(path / MANIFEST, error)
    raise_over(wire, failure, ExchangeError, draft)
    return set(files)


def _refusal(path: Path, error: BaseException) -> BaseException:
    """Return the error that this rank raises once the other ranks know of it."""
    # The error of torch is on every rank, and names the rank that failed.
    failures = error.failures if isinstance(error, dcp.CheckpointException) else {}
    rank = next(iter(failures), dist.get_rank())
    cause = innermost(error)
    is_interrupt = rank == dist.get_rank() and not isinstance(cause, Exception)
    if isinstance(cause, GradwireError) or is_interrupt:
        return cause
    why = cause.strerror if isinstance(cause, OSError) else one_line(cause)
    return ExchangeError(
        f"rank {rank} could not write {path}: {why}. The last checkpoint is untouched"
    )


def _digests(path: Path, token: str) -> dict[str, str]:
    """Return the sha256 of every file that this rank has written."""
    rank = dist.get_rank()
    files = [*path.glob(f"__{rank}_{token}_*.distcp"), *([path / METADATA] if rank == 0 else [])]
    out = {}
    for file in files:
        with file.open("rb") as content:
            out[file.name] = hashlib.file_digest(content, "sha256").hexdigest()
    return out


@torch.no_grad()
def load(wire: ShardedState, path: Path) -> None:
    """Load as `gradwire.load` does, also from a checkpoint with entries of others.

    Everything is read and checked before anything is changed. A fault on one rank is an error on
    every rank.
    """
    agree_on(wire, "load")
    failure: GradwireError | None = None
    seal, run, ready, digests = "", "", {}, [""]
    try:
        saved = SavedFolder(path)
        seal, run = saved.seal, saved.run
        ready = checked(wire, *part_of(saved, wire), same=saved.shards == wire.shards)
        digests = common_digests(ready)
    except GradwireError as error:
        failure = error
    except OSError as error:
        failure = StateError(f"{error.filename or path} cannot be read: {error.strerror}")
    except Exception as error:  # any kind, because the other ranks wait for this one
        failure = StateError(f"{path} cannot be read: {one_line(error)}")
        failure.__cause__ = error
    raise_over(wire, failure, StateError)
    _compare(wire, path, seal, digests)
    wire.restore(ready)
    note_identity(wire, run)


def _compare(wire: ShardedState, path: Path, seal: str, digests: list[str]) -> None:
    """Raise on every rank unless all have read the same manifest and parts that fit together."""
    rows, size = gather_over(wire, [seal, *digests]), wire.group.size
    for place, row in enumerate(rows):
        # Only replicas of one shard have the same bundles and the same part of x: a small parameter
        # lies on one shard. The manifest comes first.
        both = 1 + IN_COMMON.index("shared weights")
        first = rows[0][:both] + rows[place // size * size][both:]
        fits = row == first
        if not fits:
            raise StateError(f"{path}: ranks hold different checkpoints. Copy one to all.")
