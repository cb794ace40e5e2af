"""Saving and loading what the replicas of a sharded model remember.

The format is torch.distributed.checkpoint's, with a DTensor a parameter:

    gradwire.replica<r>.residual.<parameter>     what replica r keeps (velocity likewise)
    gradwire.replica<r>.shard<s>                 the short rest of one rank, as bytes

Beside torch's files `gradwire.save` writes gradwire.json, with the sha256 of each of them.

Replicas keep different residuals: without the replica in the key, one would be saved for all.
"""

import contextlib
import hashlib
import io
import logging
import operator
import re
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from gradwire.errors import ExchangeError, GradwireError, StateError, one_line
from gradwire.ranks.group import uncounted
from gradwire.ranks.together import gather_words
from gradwire.state.saved import plain
from gradwire.state.saved.check import check_sizes
from gradwire.state.saved.dcp_reader import FILE, METADATA, Reader, Writer, innermost, read
from gradwire.state.saved.files import replace
from gradwire.state.saved.manifest import (
    MANIFEST,
    adopt_identity,
    note_identity,
    read_manifest,
    refuse_other,
    write_manifest,
)
from gradwire.torch_internals import shard, shard_size

if TYPE_CHECKING:
    from gradwire.integrate.fsdp import ShardedWire

log = logging.getLogger("gradwire")

TOP = "gradwire"
VECTORS = ("residual", "velocity")


@torch.no_grad()
def state_dict(wire: "ShardedWire", guarded: bool = False) -> dict[str, Any]:
    """See `ShardedWire.state_dict`. The last step is settled: it can be skipped no more.

    guarded: whether a manifest will be written beside it, without which it is then not read.
    """
    skipped = wire.was_skipped()
    part: dict[str, Any] = {"residual": _tensors(wire, [b.residual(skipped) for b in wire.bundles])}
    if wire.config.momentum:
        part["velocity"] = _tensors(wire, [b.momentum(skipped) for b in wire.bundles])
    rest = plain.header(wire) | {
        "skipped": False,
        "user_skip": False,
        "delivered": [None] * len(wire.bundles),
        "strides": {},
        "shard": [wire.shard, wire.shards],
        "guarded": guarded,
    }
    rest["counts"]["skipped"] += int(skipped)
    content = io.BytesIO()
    torch.save(rest, content)
    return {f"replica{wire.group.rank}": part | {f"shard{wire.shard}": content.getvalue()}}


def load_state_dict(wire: "ShardedWire", saved: Mapping[str, Any]) -> None:
    """See `ShardedWire.load_state_dict`."""
    replica, shard = f"replica{wire.group.rank}", f"shard{wire.shard}"
    part = saved.get(replica, {}) if isinstance(saved, Mapping) else {}
    if shard not in part:
        raise StateError(
            f"the state has no {replica}, {shard}; with another number of replicas or shards use "
            f"gradwire.load(wire, folder)"
        )
    rest = _plain(part[shard])
    _check_place(rest, wire.group.rank, wire.group.size, wire.shard, wire.shards)
    plain.restore(wire, _checked(wire, part, rest))


def save(wire: Any, path: Path) -> None:
    """See `gradwire.save`. A collective call of all replicas and shards.

    Files have new names, and those of the last checkpoint go when this one is whole.
    """
    _agree(wire, "save")
    adopt_identity(wire, _groups(wire))
    token = _everywhere(wire, secrets.token_hex(4))[0]
    failure: Exception | None = None
    content: dict[str, Any] = {}
    old: dict[str, bytes] = {}
    try:
        refuse_other(wire, path)
        path.mkdir(parents=True, exist_ok=True)
        content = state_dict(wire, guarded=True)
        files = [file for name in (METADATA, MANIFEST) if (file := path / name).is_file()]
        old = {file.name: file.read_bytes() for file in files}
    except GradwireError as error:
        failure = error
    except Exception as error:  # of whatever kind: the others wait
        failure = _refusal(path, error)
    _raise_together(wire, failure, ExchangeError)
    try:
        _write(wire, path, token, content)
    except BaseException:
        _take_back(path, token, old)
        raise


def _write(wire: Any, path: Path, token: str, content: dict[str, Any]) -> None:
    failure: Exception | None = None
    digests: dict[str, str] = {}
    named = _named(path)
    try:
        with warnings.catch_warnings():
            # torch's warning of files that it would overwrite: these have new names.
            warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
            dcp.save({TOP: content}, storage_writer=Writer(path, token))
        digests = _digests(path, token)
    except (Exception, dcp.CheckpointException) as error:
        failure = _refusal(path, innermost(error))
    _raise_together(wire, failure, ExchangeError)
    every = _everywhere(wire, digests)
    files = {name: digest for found in every for name, digest in found.items()}
    if dist.get_rank() == 0:
        try:
            write_manifest(path, {"steps": wire.steps, "run": wire.identity, "files": files})
        except Exception as error:
            failure = _refusal(path / MANIFEST, error)
    _raise_together(wire, failure, ExchangeError)
    for name in named - files.keys():
        with contextlib.suppress(OSError):
            (path / name).unlink()


def _take_back(path: Path, token: str, old: Mapping[str, bytes]) -> None:
    """Delete what a save has written that failed, and put back what it has replaced."""
    rank = dist.get_rank()
    left = list(path.glob(f"__{rank}_{token}_*"))
    if rank == 0:
        left += [path / f"{METADATA}.tmp", *(path / n for n in {METADATA, MANIFEST} - old.keys())]
        for name, content in old.items():
            with contextlib.suppress(OSError):
                replace(path / name, operator.methodcaller("write", content))
    for file in left:
        with contextlib.suppress(OSError):
            file.unlink()


def _named(path: Path) -> set[str]:
    """The files of the checkpoint that is in the folder."""
    try:
        files = read_manifest(path).get("files", {})
    except (StateError, OSError):
        return set()
    return {name for name in files if FILE.fullmatch(name)}


def _refusal(path: Path, error: BaseException) -> ExchangeError:
    why = error.strerror if isinstance(error, OSError) else one_line(error)
    return ExchangeError(f"{path} could not be written: {why}. The last checkpoint is untouched")


def _digests(path: Path, token: str) -> dict[str, str]:
    """The sha256 of every file that this rank has written."""
    rank = dist.get_rank()
    files = [*path.glob(f"__{rank}_{token}_*.distcp"), *([path / METADATA] if rank == 0 else [])]
    out = {}
    for file in files:
        with file.open("rb") as content:
            out[file.name] = hashlib.file_digest(content, "sha256").hexdigest()
    return out


@torch.no_grad()
def load(wire: Any, path: Path) -> None:
    """See `gradwire.load`. Finds the wire's part also in a checkpoint that holds more.

    Everything is read and checked before anything is changed; what is wrong on one rank is an
    error on all.
    """
    _agree(wire, "load")
    failure: GradwireError | None = None
    seal, run, ready, shared = "", "", {}, [""]
    try:
        saved = Saved(path)
        seal, run = saved.seal, saved.run
        ready = _checked(wire, *_part_of(saved, wire), same=saved.shards == wire.shards)
        shared = plain.in_common(ready)
    except GradwireError as error:
        failure = error
    except OSError as error:
        failure = StateError(f"{error.filename or path} cannot be read: {error.strerror}")
    except Exception as error:  # of whatever kind: the others wait
        failure = StateError(f"{path} cannot be read: {one_line(error)}")
        failure.__cause__ = error
    _raise_together(wire, failure, StateError)
    _compare(wire, path, seal, shared)
    plain.restore(wire, ready)
    note_identity(wire, run)


def _compare(wire: Any, path: Path, seal: str, shared: list[str]) -> None:
    """Raises on every rank unless all have read the same manifest and parts that fit together."""
    rows = _everywhere(wire, [seal, *shared])
    size = wire.group.size
    for place, row in enumerate(rows):
        # Shards differ in their bundles: a small parameter is on one of them only.
        fits = row[:-1] == rows[0][:-1] and row[-1] == rows[place // size * size][-1]
        if not fits:
            raise StateError(f"{path}: ranks hold different checkpoints. Copy one to all.")


def _part_of(saved: "Saved", wire: Any) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """This rank's shard of the vectors, the mean over replicas where their number differs."""
    saved.check(wire)
    replicas = range(saved.replicas)
    if saved.replicas == wire.group.size:
        replicas = range(wire.group.rank, wire.group.rank + 1)
    part: dict[str, dict[str, Tensor]] = {}
    rest: dict[str, Any] = {}
    for replica in replicas:
        vectors, content = saved.read(wire, replica)
        other = _plain(content)
        saved.check_rest(wire, replica, other)
        rest = rest or other
        for what, tensors in vectors.items():
            total = part.setdefault(what, {})
            for name, tensor in tensors.items():
                share = tensor if len(replicas) == 1 else tensor.double() / len(replicas)
                total[name] = total[name] + share if name in total else share
    return part, rest


def _groups(wire: Any) -> list[Any]:
    """The replicas of this rank's shard, then the shards of this rank's replica."""
    return [wire.group, wire.engine.shards]


def _agree(wire: Any, what: str) -> None:
    for group in _groups(wire):
        with uncounted(group):
            group.agree(what, steps=wire.steps if what == "save" else 0)


def _everywhere(wire: Any, value: Any) -> list[Any]:
    """`value` of every rank. A collective call."""
    replicas, shards = _groups(wire)
    with uncounted(replicas):
        mine = gather_words(replicas, value, wire.device)
    return [one for row in gather_words(shards, mine, wire.device) for one in row]


def _raise_together(wire: Any, failure: Exception | None, kind: type[GradwireError]) -> None:
    """Raises on every rank when one of them failed.

    A rank that failed raises its own error; the others a `kind` that names the first such rank.
    """
    words = "" if failure is None else f"rank {dist.get_rank()}: {failure}"
    first = next((said for said in _everywhere(wire, words) if said), None)
    if first is not None:
        raise failure or kind(first)


class Saved:
    """What a checkpoint folder holds for a wire."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._manifest = manifest = _manifest(path)
        self._digests = manifest.get("files", {})
        self.seal, self.run = manifest.get("sha256", ""), manifest.get("run", "")
        metadata = Reader(path, self._digests).read_metadata()
        self._entries = metadata.state_dict_metadata
        pattern = re.compile(r"(.*\.)replica(\d+)\.shard(\d+)")
        found = [m.groups() for m in map(pattern.fullmatch, self._entries) if m]
        prefixes = {prefix for prefix, _, _ in found}
        if len(prefixes) != 1:
            raise StateError(f"{path} holds {len(prefixes)} states of a sharded wire, expected 1")
        self._prefix = prefixes.pop()
        self.replicas = 1 + max(int(replica) for _, replica, _ in found)
        self.shards = 1 + max(int(shard) for _, _, shard in found)
        if self.replicas * self.shards != len(found):
            raise StateError(
                f"{path} holds {len(found)} of {self.replicas * self.shards} ranks' parts: copy "
                f"every file into the folder"
            )

    def check(self, wire: Any) -> None:
        """Raises StateError unless the parameters are those of this model."""
        start = f"{self._prefix}replica0.residual."
        entries: Mapping[str, Any] = self._entries
        sizes = {k[len(start) :]: e.size for k, e in entries.items() if k.startswith(start)}
        wanted = {p.name: shard(p.parameter).size() for u in wire.units for p in u.places}
        if odd := sorted(sizes.keys() ^ wanted.keys()):
            raise StateError(f"{self._path} and this model differ in parameters: {odd[:3]}")
        for name, size in wanted.items():
            if sizes[name] != size:
                raise StateError(
                    f"residual of {name!r} has shape {tuple(sizes[name])}, the model's is "
                    f"{tuple(size)}"
                )

    def check_rest(self, wire: Any, replica: int, rest: Mapping[str, Any]) -> None:
        """Raises StateError unless what one rank says of itself is what the folder says of it."""
        if not self._manifest and rest.get("guarded"):
            raise StateError(
                f"{self._path} holds no checkpoint: {MANIFEST} is not there. Copy every file into "
                f"the folder"
            )
        for field in self._manifest.keys() & {"run", "steps"}:
            if rest.get(field) != self._manifest[field]:
                raise StateError(
                    f"{self._path}: the {field} of replica {replica} is {rest.get(field)!r:.40}, "
                    f"that of {MANIFEST} {self._manifest[field]!r:.40}: it is of another checkpoint"
                )
        shard = wire.shard if self.shards == wire.shards else 0
        _check_place(rest, replica, self.replicas, shard, self.shards)

    def read(self, wire: Any, replica: int) -> tuple[dict[str, dict[str, Tensor]], bytes]:
        """This rank's shard of one replica's vectors, and the rest of one rank of it."""
        where = f"{self._prefix}replica{replica}"
        shard = f"{where}.shard{wire.shard if self.shards == wire.shards else 0}"
        names = [p.name for unit in wire.units for p in unit.places]
        flat: dict[str, Any] = {
            f"{where}.{what}.{name}": tensor
            for what in VECTORS
            if f"{where}.{what}.{names[0]}" in self._entries
            for name, tensor in _tensors(wire, None).items()
        }
        found = read(self._path, self._digests, flat | {shard: b""})
        local: dict[str, dict[str, Tensor]] = {}
        for key in flat:
            what, name = key[len(where) + 1 :].split(".", 1)
            local.setdefault(what, {})[name] = found[key].to_local()
        return local, found[shard]


def _manifest(path: Path) -> dict[str, Any]:
    """What gradwire wrote beside the folder's own files; nothing where somebody else wrote it."""
    if (path / MANIFEST).exists() or not (path / METADATA).exists():
        manifest = read_manifest(path)
        files = manifest.get("files")
        if not isinstance(files, dict) or METADATA not in files:
            raise StateError(f"{path} is of a model that is not sharded")
        return manifest
    log.warning("%s has no %s: whether its files are damaged cannot be seen", path, MANIFEST)
    return {}


def _tensors(wire: "ShardedWire", vectors: list[Tensor] | None) -> dict[str, DTensor]:
    """Each parameter's part of its bundle's vector, sharded as the parameter is; zeros for None."""
    out = {}
    for unit in wire.units:
        for place in unit.places:
            like = shard(place.parameter)
            local = torch.zeros(
                shard_size(place.parameter), dtype=torch.float32, device=wire.device
            )
            if vectors is not None and place.numel:
                bundle, slot = wire.home(place.name)
                local.copy_(bundle.view(vectors[bundle.index], slot))
            out[place.name] = DTensor.from_local(
                local,
                like.device_mesh,
                like.placements,
                run_check=False,
                shape=like.size(),
                stride=like.stride(),
            )
    return out


def _plain(content: Any) -> dict[str, Any]:
    """The short rest of one rank."""
    try:
        rest = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        raise StateError(f"the state of one rank is damaged: {one_line(error)}") from error
    if not isinstance(rest, dict):
        raise StateError(f"the state of one rank is a {type(rest).__name__}, not a dictionary")
    check_sizes(rest)
    return rest


def _check_place(
    rest: Mapping[str, Any], replica: int, replicas: int, shard: int, shards: int
) -> None:
    """Raises StateError for the state of another rank. The last release did not note the shard."""
    found = [rest.get("rank"), rest.get("world_size"), rest.get("shard", [shard, shards])]
    if found != [replica, replicas, [shard, shards]]:
        raise StateError(
            f"what should be of replica {replica}, shard {shard} is of replica {found[0]!r:.20}, "
            f"shard {found[2]!r:.20}: copy the files again"
        )


def _checked(
    wire: "ShardedWire", part: Mapping[str, Any], saved: dict[str, Any], same: bool = True
) -> dict[str, Any]:
    """The state in `part` and `saved`, ready to be restored; raises StateError for another model's.

    same: whether the number of shards is the one it was saved with.
    """
    if not same:
        # What methods remember belongs to a shard of the old size: they begin anew.
        log.info("another number of shards: the methods' memories begin anew")
        saved["bundles"] = [[slot.name for slot in b.slots] for b in wire.bundles]
        saved["memory"] = [{} for _ in wire.bundles]
        saved["delivered"] = [None for _ in wire.bundles]
    for what in VECTORS:
        found = part.get(what, {})
        if not isinstance(found, Mapping) or not all(map(_is_tensor, found.values())):
            raise StateError(f"the state's {what} must be tensors by name")
        tensors = {name: _local(tensor).float() for name, tensor in found.items()}
        saved[what] = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    plain.check(wire, saved)
    for names in saved["bundles"]:
        if len({wire.home(name)[1].unit for name in names}) > 1:
            raise StateError(
                f"the state was saved with other modules sharded: {names[0]!r} and {names[-1]!r} "
                f"were reduced together. Call fully_shard on the same modules as then."
            )
    return saved


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
