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
import logging
import re
import secrets
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from gradwire.accumulate.owned import OWNED
from gradwire.errors import ExchangeError, GradwireError, StateError, one_line
from gradwire.exchange import EXCHANGES
from gradwire.ranks.group import uncounted
from gradwire.ranks.together import gather_words
from gradwire.state.saved import plain
from gradwire.state.saved.check import check_sizes
from gradwire.state.saved.cuts import ShardedState
from gradwire.state.saved.dcp_reader import (
    METADATA,
    Reader,
    Writer,
    innermost,
    mend_metadata,
    read_into,
)
from gradwire.state.saved.draft import Draft, files_of
from gradwire.state.saved.manifest import (
    MANIFEST,
    adopt_identity,
    note_identity,
    read_manifest,
    refuse_other,
    write_manifest,
)
from gradwire.torch_internals import local_of

log = logging.getLogger("gradwire")

_TOP = "gradwire"
_VECTORS = ("residual", "velocity", "owned")
"""Vectors of any state, for the parameters that are not empty."""
_REPLICA_VECTORS = ("weights", "departures")
_SHARED_VECTORS = ("reference", "outer", "update")
_OURS = re.compile(r"__\d+_[0-9a-f]{8}_\d+\.distcp")
"""Names of the data files that `save` writes; those of torch have no word in the middle."""


@torch.no_grad()
def state_dict(wire: ShardedState, guarded: bool = False) -> dict[str, Any]:
    """Return the value of ShardedWire.state_dict, with the last step settled.

    After a resume that step cannot be skipped any more. guarded: True if a manifest is written
    too. Then `load` refuses the folder without its manifest.
    """
    skipped = wire.was_skipped()
    part: dict[str, Any] = {"residual": _tensors(wire, [b.residual(skipped) for b in wire.bundles])}
    if wire.config.momentum:
        part["velocity"] = _tensors(wire, [b.momentum(skipped) for b in wire.bundles])
    if EXCHANGES[wire.config.exchange].owns_parts:
        kept = [b.owned_vector(skipped) if b.keeps_owned else 0 * b.u for b in wire.bundles]
        part["owned"] = _tensors(wire, kept)
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
    header = _parse_header(part[shard])
    _check_place(header, wire.group.rank, wire.group.size, wire.shard, wire.shards)
    wire.restore(_checked(wire, {**part, **saved.get("shared", {})}, header))


def save(wire: ShardedState, path: Path) -> None:
    """Save as `gradwire.save` does. A collective call of all replicas and shards.

    Files have new names. The files of the last checkpoint go when the new one is whole.
    """
    _refuse_part_of_job(wire)
    rank = dist.get_rank()
    draft = Draft(path, rank, [METADATA, MANIFEST] if rank == 0 else [])
    _agree(wire, "save")
    adopt_identity(wire, _groups(wire))
    token = _gather_all(wire, secrets.token_hex(4))[0]
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
    ranks, job = wire.group.size * wire.shards, dist.get_world_size()
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
    _raise_together(wire, failure, ExchangeError, draft)
    try:
        with warnings.catch_warnings():
            # torch warns that it may overwrite files, but the new files have new names.
            warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
            dcp.save({_TOP: content}, storage_writer=Writer(path, token))
        digests = _digests(path, token)
    except BaseException as error:
        failure = _refusal(path, error)
    draft.new = [*path.glob(f"__{dist.get_rank()}_{token}_*"), *path.glob(f"{METADATA}.tmp")]
    _raise_together(wire, failure, ExchangeError, draft)
    files = {name: value for part in _gather_all(wire, digests) for name, value in part.items()}
    if dist.get_rank() == 0:
        try:
            write_manifest(path, {"steps": wire.steps, "run": wire.identity, "files": files})
        except BaseException as error:
            failure = _refusal(path / MANIFEST, error)
    _raise_together(wire, failure, ExchangeError, draft)
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
    _agree(wire, "load")
    failure: GradwireError | None = None
    seal, run, ready, digests = "", "", {}, [""]
    try:
        saved = _SavedFolder(path)
        seal, run = saved.seal, saved.run
        ready = _checked(wire, *_part_of(saved, wire), same=saved.shards == wire.shards)
        digests = plain.common_digests(ready)
    except GradwireError as error:
        failure = error
    except OSError as error:
        failure = StateError(f"{error.filename or path} cannot be read: {error.strerror}")
    except Exception as error:  # any kind, because the other ranks wait for this one
        failure = StateError(f"{path} cannot be read: {one_line(error)}")
        failure.__cause__ = error
    _raise_together(wire, failure, StateError)
    _compare(wire, path, seal, digests)
    wire.restore(ready)
    note_identity(wire, run)


def _compare(wire: ShardedState, path: Path, seal: str, digests: list[str]) -> None:
    """Raise on every rank unless all have read the same manifest and parts that fit together."""
    rows, size = _gather_all(wire, [seal, *digests]), wire.group.size
    for place, row in enumerate(rows):
        # Only replicas of one shard have the same bundles and the same part of x: a small parameter
        # lies on one shard. The manifest comes first.
        both = 1 + plain.IN_COMMON.index("shared weights")
        first = rows[0][:both] + rows[place // size * size][both:]
        fits = row == first
        if not fits:
            raise StateError(f"{path}: ranks hold different checkpoints. Copy one to all.")


def _part_of(
    saved: "_SavedFolder", wire: ShardedState
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Return this rank's shard of the vectors, and a header.

    When the number of replicas has changed, return the mean over all saved replicas.
    """
    wire.check_kind(_parse_header(saved.read_first_header()))
    saved.check_parameters(wire)
    replicas = range(saved.replicas)
    if saved.replicas == wire.group.size:
        replicas = range(wire.group.rank, wire.group.rank + 1)
    is_same = saved.replicas == wire.group.size and saved.shards == wire.shards
    part: dict[str, dict[str, Tensor]] = {}
    first: dict[str, Any] = {}
    for replica in replicas:
        vectors, content = saved.read_replica(wire, replica)
        header = _parse_header(content)
        saved.check_header(wire, replica, header)
        if not first:
            first = header
            part = saved.read_shared(wire) | saved.read_moments(wire, replica)
        if not is_same:
            # Owners of the mean will have other parts.
            for name, tensor in vectors.pop("owned", {}).items():
                vectors["residual"][name] = vectors["residual"][name] + saved.replicas * tensor
        for field, tensors in vectors.items():
            total = part.setdefault(field, {})
            for name, tensor in tensors.items():
                share = tensor if len(replicas) == 1 else tensor.double() / len(replicas)
                total[name] = total[name] + share if name in total else share
    return part, first


def _groups(wire: ShardedState) -> list[Any]:
    """Return the replicas of this rank's shard, then the shards of this rank's replica."""
    return [wire.group, *wire.inner_groups]


def _agree(wire: ShardedState, operation: str) -> None:
    """Raise on every rank unless all run `operation`. Before a load the steps may differ."""
    for group in _groups(wire):
        with uncounted(group):
            group.agree(operation, steps=wire.steps if operation == "save" else 0)


def _gather_all(wire: ShardedState, value: Any) -> list[Any]:
    """Return `value` of every rank: of all replicas of shard 0, then of shard 1, and so on.

    A collective call.
    """
    values = [value]
    for group in _groups(wire):
        with uncounted(group):
            rows = gather_words(group, values, wire.device)
        values = [word for row in rows for word in row]
    return values


def _raise_together(
    wire: ShardedState,
    failure: BaseException | None,
    kind: type[GradwireError],
    draft: Draft | None = None,
) -> None:
    """Undo the draft and raise on every rank when one of them failed.

    A rank that failed raises its own error. The others raise a `kind` with the first failure.
    """
    words = ""
    if failure is not None:
        words = f"rank {dist.get_rank()}: {str(failure) or one_line(failure)}"
    first = next((text for text in _gather_all(wire, words) if text), None)
    if first is not None:
        if draft is not None:
            draft.undo()
        raise failure or kind(first)


class _SavedFolder:
    """The entries of one sharded wire in a checkpoint folder, which may hold others too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._manifest = manifest = _read_manifest(path)
        self._digests = manifest.get("files", {})
        self.seal, self.run = manifest.get("sha256", ""), manifest.get("run", "")
        metadata = Reader(path, self._digests).read_metadata()
        self._entries = metadata.state_dict_metadata
        pattern = re.compile(r"(.*\.)replica(\d+)\.shard(\d+)")
        headers = [m.groups() for m in map(pattern.fullmatch, self._entries) if m]
        prefixes = {prefix for prefix, _, _ in headers}
        if len(prefixes) != 1:
            raise StateError(f"{path} holds {len(prefixes)} states of a sharded wire, expected 1")
        self._prefix = prefixes.pop()
        self.replicas = 1 + max(int(replica) for _, replica, _ in headers)
        self.shards = 1 + max(int(shard) for _, _, shard in headers)
        if self.replicas * self.shards != len(headers):
            raise StateError(
                f"{path} holds {len(headers)} of {self.replicas * self.shards} ranks' parts: copy "
                f"every file into the folder"
            )

    def read_first_header(self) -> bytes:
        """Return the header of the first rank."""
        key = f"{self._prefix}replica0.shard0"
        content: bytes = read_into(self._path, self._digests, {key: b""})[key]
        return content

    def check_parameters(self, wire: ShardedState) -> None:
        """Raise StateError unless names and sizes of the parameters are this model's."""
        start = f"{self._prefix}replica0.residual."
        entries: Mapping[str, Any] = self._entries
        sizes = {k[len(start) :]: e.size for k, e in entries.items() if k.startswith(start)}
        wanted = {name: torch.Size(cut.size) for name, cut in wire.cuts().items()}
        if names := sorted(sizes.keys() ^ wanted.keys()):
            raise StateError(f"{self._path} and this model differ in parameters: {names[:3]}")
        for name, size in wanted.items():
            if sizes[name] != size:
                raise StateError(
                    f"residual of {name!r} has shape {tuple(sizes[name])}, the model's is "
                    f"{tuple(size)}"
                )

    def check_header(self, wire: ShardedState, replica: int, header: Mapping[str, Any]) -> None:
        """Raise StateError unless a rank's header agrees with the manifest and the rank's place."""
        if not self._manifest and header.get("guarded"):
            raise StateError(
                f"{self._path} holds no checkpoint: {MANIFEST} is not there. Copy every file into "
                f"the folder"
            )
        for field in self._manifest.keys() & {"run", "steps"}:
            if header.get(field) != self._manifest[field]:
                raise StateError(
                    f"{self._path}: the {field} of replica {replica} is {header.get(field)!r:.40}, "
                    f"that of {MANIFEST} {self._manifest[field]!r:.40}: it is of another checkpoint"
                )
        shard = wire.shard if self.shards == wire.shards else 0
        _check_place(header, replica, self.replicas, shard, self.shards)

    def read_replica(
        self, wire: ShardedState, replica: int
    ) -> tuple[dict[str, dict[str, Tensor]], bytes]:
        """Return this rank's shard of one replica's vectors, and the header of a rank of it.

        When the number of shards has changed, the header is that of shard 0.
        """
        prefix = f"{self._prefix}replica{replica}."
        shard = f"{prefix}shard{wire.shard if self.shards == wire.shards else 0}"
        filled = self._read(wire, prefix, [*_VECTORS, *_REPLICA_VECTORS], {shard: b""})
        content: bytes = filled.pop(shard)
        return _by_field(filled, prefix), content

    def read_shared(self, wire: ShardedState) -> dict[str, dict[str, Tensor]]:
        """Return this rank's part of the vectors that all replicas have alike."""
        prefix = f"{self._prefix}shared."
        return _by_field(self._read(wire, prefix, _SHARED_VECTORS), prefix)

    def read_moments(self, wire: ShardedState, replica: int) -> dict[str, Any]:
        """Return the moments of a replica's optimisers, "<n>.<key>.<parameter>" in "optimizer".

        Moments are cut as the parameters are, or whole where every rank has them whole.
        """
        prefix = f"{self._prefix}replica{replica}.optimizer."
        into: dict[str, Any] = {}
        entries: Mapping[str, Any] = self._entries
        cuts = wire.cuts()
        for key, entry in entries.items():
            name = key[len(prefix) :].split(".", 2)[-1]
            if not key.startswith(prefix) or name not in cuts:
                continue
            dtype = entry.properties.dtype
            if not wire.has_whole_moments and torch.Size(cuts[name].size) == entry.size:
                empty = torch.zeros(tuple(cuts[name].shape), dtype=dtype, device=wire.device)
                into[key] = cuts[name].wrap(empty)
            else:
                into[key] = torch.zeros(entry.size, dtype=dtype, device=wire.device)
        filled = read_into(self._path, self._digests, into) if into else {}
        return {"optimizer": {key[len(prefix) :]: tensor for key, tensor in filled.items()}}

    def _read(
        self,
        wire: ShardedState,
        prefix: str,
        fields: Sequence[str],
        into: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the vectors of these fields that the folder has, as local parts, and `into`."""
        wanted = dict(into or {})
        entries: Mapping[str, Any] = self._entries
        for field in fields:
            for name, cut in wire.cuts().items():
                if (key := f"{prefix}{field}.{name}") in entries:
                    dtype = entries[key].properties.dtype
                    empty = torch.zeros(tuple(cut.shape), dtype=dtype, device=wire.device)
                    wanted[key] = cut.wrap(empty)
        filled = read_into(self._path, self._digests, wanted) if wanted else {}
        return {key: _local(value) for key, value in filled.items()}


def _by_field(filled: Mapping[str, Tensor], prefix: str) -> dict[str, dict[str, Tensor]]:
    """Return tensors by field and by name, out of "<prefix><field>.<name>"."""
    out: dict[str, dict[str, Tensor]] = {}
    for key, tensor in filled.items():
        field, name = key[len(prefix) :].split(".", 1)
        out.setdefault(field, {})[name] = tensor
    return out


def _read_manifest(path: Path) -> dict[str, Any]:
    """Return the folder's manifest, {} if the folder was written without gradwire.save."""
    if (path / MANIFEST).exists() or not (path / METADATA).exists():
        manifest = read_manifest(path)
        files = manifest.get("files")
        if not isinstance(files, dict) or METADATA not in files:
            raise StateError(f"{path} is of a model that is not sharded")
        return manifest
    log.warning("%s has no %s: whether its files are damaged cannot be seen", path, MANIFEST)
    return {}


def _tensors(wire: ShardedState, vectors: list[Tensor] | None) -> dict[str, DTensor]:
    """Return each parameter's part of its bundle's vector as a DTensor sharded like the parameter.

    vectors: one per bundle; None stands for zeros.
    """
    out = {}
    for name, cut in wire.cuts().items():
        local = torch.zeros(tuple(cut.shape), dtype=torch.float32, device=wire.device)
        if vectors is not None and local.numel():
            bundle, slot = wire.home(name)
            local.copy_(bundle.view(vectors[bundle.index], slot))
        out[name] = cut.wrap(local)
    return out


def _parse_header(content: Any) -> dict[str, Any]:
    """Return the header of one rank, which is read without running a pickle."""
    try:
        header = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        raise StateError(f"the state of one rank is damaged: {one_line(error)}") from error
    if not isinstance(header, dict):
        raise StateError(f"the state of one rank is a {type(header).__name__}, not a dictionary")
    check_sizes(header)
    return header


def _check_place(
    header: Mapping[str, Any], replica: int, replicas: int, shard: int, shards: int
) -> None:
    """Raise StateError if a header is of another rank."""
    # The last release did not save the shard.
    place = [header.get("rank"), header.get("world_size"), header.get("shard", [shard, shards])]
    if place != [replica, replicas, [shard, shards]]:
        raise StateError(
            f"what should be of replica {replica}, shard {shard} is of replica {place[0]!r:.20}, "
            f"shard {place[2]!r:.20}: copy the files again"
        )


def _checked(
    wire: ShardedState, part: Mapping[str, Any], saved: dict[str, Any], same: bool = True
) -> dict[str, Any]:
    """Return the state in `part` and the header `saved`, ready for `restore`.

    Raise StateError unless it fits this model. same: True if the number of shards has not changed.
    """
    if not same:
        # A method's memory belongs to a shard of the old size, so methods begin anew.
        log.info("another number of shards: the methods' memories begin anew")
        saved["bundles"] = [[slot.name for slot in b.slots] for b in wire.bundles]
        saved["memory"] = [{} for _ in wire.bundles]
        saved["delivered"] = [None for _ in wire.bundles]
    for field in _VECTORS:
        vectors = part.get(field, {})
        if not isinstance(vectors, Mapping) or not all(map(_is_tensor, vectors.values())):
            raise StateError(f"the state's {field} must be tensors by name")
        tensors = {name: _local(tensor).float() for name, tensor in vectors.items()}
        saved[field] = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    wire.adopt_vectors(saved, part)
    plain.check_state(wire, saved)
    for names in saved["bundles"]:
        if len({wire.home(name)[1].unit for name in names}) > 1:
            raise StateError(
                f"the state was saved with other modules sharded: {names[0]!r} and {names[-1]!r} "
                f"were reduced together. Call fully_shard on the same modules as then."
            )
    return saved


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _local(tensor: Any) -> Any:
    return local_of(tensor)
