"""Saving and loading what the replicas of a sharded model remember.

The format is torch.distributed.checkpoint's, with a DTensor a parameter:

    gradwire.replica<r>.residual.<parameter>     what replica r keeps (velocity likewise)
    gradwire.replica<r>.shard<s>                 the short rest of one rank, as bytes

Beside torch's files `gradwire.save` writes gradwire.json, with the sha256 of each of them.

Replicas keep different residuals: without the replica in the key, one would be saved for all.
"""

import hashlib
import io
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from gradwire import packing
from gradwire.cluster.gossip import gather_words
from gradwire.cluster.group import uncounted
from gradwire.dcp_reader import METADATA, Reader, innermost, read
from gradwire.errors import ExchangeError, GradwireError, StateError, one_line
from gradwire.manifest import (
    MANIFEST,
    adopt_identity,
    note_identity,
    read_manifest,
    refuse_other,
    write_manifest,
)

if TYPE_CHECKING:
    from gradwire.integrate.fsdp import ShardedWire

log = logging.getLogger("gradwire")

TOP = "gradwire"
VECTORS = ("residual", "velocity")


@torch.no_grad()
def state_dict(wire: "ShardedWire") -> dict[str, Any]:
    """See `ShardedWire.state_dict`. The last step is settled: it can be skipped no more."""
    skipped = wire.was_skipped()
    part: dict[str, Any] = {"residual": _tensors(wire, [b.residual(skipped) for b in wire.bundles])}
    if wire.config.momentum:
        part["velocity"] = _tensors(wire, [b.momentum(skipped) for b in wire.bundles])
    rest = packing.header(wire) | {
        "skipped": False,
        "user_skip": False,
        "delivered": [None] * len(wire.bundles),
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
    packing.restore(wire, _checked(wire, part, part[shard]))


def save(wire: Any, path: Path) -> None:
    """See `gradwire.save`. A collective call of all replicas and shards."""
    _agree(wire, "save")
    adopt_identity(wire, _groups(wire))
    failure: Exception | None = None
    digests: dict[str, str] = {}
    try:
        refuse_other(wire, path)
    except GradwireError as error:
        failure = error
    _fail_together(wire, failure)
    try:
        dcp.save({TOP: wire}, checkpoint_id=str(path))
        digests = _digests(path)
    except (Exception, dcp.CheckpointException) as error:
        failure = ExchangeError(f"{path} could not be written: {one_line(innermost(error))}")
    _fail_together(wire, failure)
    every = _everywhere(wire, digests)
    files = {name: digest for found in every for name, digest in found.items()}
    if dist.get_rank() == 0:
        try:
            write_manifest(path, {"steps": wire.steps, "run": wire.identity, "files": files})
        except OSError as error:
            failure = ExchangeError(f"{path / MANIFEST} could not be written: {error.strerror}")
    _fail_together(wire, failure)


def _digests(path: Path) -> dict[str, str]:
    """The sha256 of every file that this rank has written."""
    rank = dist.get_rank()
    files = [*path.glob(f"__{rank}_*.distcp"), *([path / METADATA] if rank == 0 else [])]
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
    seal, run, ready = "", "", {}
    try:
        saved = Saved(path)
        seal, run = saved.seal, saved.run
        ready = _checked(wire, *_part_of(saved, wire), same=saved.shards == wire.shards)
    except GradwireError as error:
        failure = error
    except OSError as error:
        failure = StateError(f"{error.filename or path} cannot be read: {error.strerror}")
    except Exception as error:  # of whatever kind: the others wait
        failure = StateError(f"{path} cannot be read: {one_line(error)}")
        failure.__cause__ = error
    _fail_together(wire, failure)
    seals = _everywhere(wire, seal)
    if any(other != seals[0] for other in seals):
        raise StateError(f"{path}: ranks hold different checkpoints. Copy one to all.")
    packing.restore(wire, ready)
    note_identity(wire, run)


def _part_of(saved: "Saved", wire: Any) -> tuple[dict[str, dict[str, Tensor]], bytes]:
    """This rank's shard of the vectors, the mean over replicas where their number differs."""
    saved.check(wire)
    replicas = range(saved.replicas)
    if saved.replicas == wire.group.size:
        replicas = range(wire.group.rank, wire.group.rank + 1)
    part: dict[str, dict[str, Tensor]] = {}
    rest = b""
    for replica in replicas:
        vectors, other = saved.read(wire, replica)
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


def _fail_together(wire: Any, failure: Exception | None) -> None:
    """Raises on every rank when one of them failed: there its own, elsewhere one that names it."""
    words = "" if failure is None else f"rank {dist.get_rank()}: {failure}"
    first = next((said for said in _everywhere(wire, words) if said), None)
    if first is not None:
        raise failure or StateError(first)


class Saved:
    """What a checkpoint folder holds for a wire."""

    def __init__(self, path: Path) -> None:
        self._path = path
        manifest = _manifest(path)
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
        wanted = {p.name: p.parameter.sharded_param.size() for u in wire.units for p in u.places}
        if odd := sorted(sizes.keys() ^ wanted.keys()):
            raise StateError(f"{self._path} and this model differ in parameters: {odd[:3]}")
        for name, size in wanted.items():
            if sizes[name] != size:
                raise StateError(
                    f"residual of {name!r} has shape {tuple(sizes[name])}, the model's is "
                    f"{tuple(size)}"
                )

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
            like = place.parameter.sharded_param
            local = torch.zeros(place.parameter.sharded_size, device=wire.device)
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


def _checked(
    wire: "ShardedWire", part: Mapping[str, Any], rest: bytes, same: bool = True
) -> dict[str, Any]:
    """The state in `part` and `rest`, ready to be restored; raises StateError for another model's.

    same: whether the number of shards is the one it was saved with.
    """
    try:
        saved = torch.load(io.BytesIO(rest), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        raise StateError(f"the state of one rank is damaged: {one_line(error)}") from error
    if not isinstance(saved, dict):
        raise StateError(f"the state of one rank is a {type(saved).__name__}, not a dictionary")
    if not same:
        # What methods remember belongs to a shard of the old size: they begin anew.
        log.info("another number of shards: the methods' memories begin anew")
        saved["bundles"] = [[slot.name for slot in b.slots] for b in wire.bundles]
        saved["memory"] = [{} for _ in wire.bundles]
        saved["delivered"] = [None for _ in wire.bundles]
    for what in VECTORS:
        tensors = {name: _local(tensor).float() for name, tensor in part.get(what, {}).items()}
        saved[what] = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    packing.check(wire, saved)
    for names in saved["bundles"]:
        if len({wire.home(name)[1].unit for name in names}) > 1:
            raise StateError(
                f"the state was saved with other modules sharded: {names[0]!r} and {names[-1]!r} "
                f"were reduced together. Call fully_shard on the same modules as then."
            )
    return saved


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
