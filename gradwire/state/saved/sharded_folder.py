"""Folders of a sharded model, read by the ranks of any number of replicas and shards."""

import io
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gradwire.errors import StateError, one_line
from gradwire.state.saved import plain
from gradwire.state.saved.check import check_sizes
from gradwire.state.saved.cuts import ShardedState
from gradwire.state.saved.dcp_reader import (
    METADATA,
    Reader,
    read_into,
)
from gradwire.state.saved.manifest import (
    MANIFEST,
    read_manifest,
)
from gradwire.types import local_of

log = logging.getLogger("gradwire")

VECTORS = ("residual", "velocity", "owned")
"""Vectors of any state, for the parameters that are not empty."""
_REPLICA_VECTORS = ("weights", "departures")
_SHARED_VECTORS = ("reference", "outer", "update")


def part_of(
    saved: "SavedFolder", wire: ShardedState
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Return this rank's shard of the vectors, and a header.

    When the number of replicas has changed, return the mean over all saved replicas.
    """
    wire.check_kind(parse_header(saved.read_first_header()))
    saved.check_parameters(wire)
    replicas = range(saved.replicas)
    if saved.replicas == wire.group.size:
        replicas = range(wire.group.rank, wire.group.rank + 1)
    is_same = saved.replicas == wire.group.size and saved.shards == wire.shards
    part: dict[str, dict[str, Tensor]] = {}
    first: dict[str, Any] = {}
    for replica in replicas:
        vectors, content = saved.read_replica(wire, replica)
        header = parse_header(content)
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


class SavedFolder:
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
        check_place(header, replica, self.replicas, shard, self.shards)

    def read_replica(
        self, wire: ShardedState, replica: int
    ) -> tuple[dict[str, dict[str, Tensor]], bytes]:
        """Return this rank's shard of one replica's vectors, and the header of a rank of it.

        When the number of shards has changed, the header is that of shard 0.
        """
        prefix = f"{self._prefix}replica{replica}."
        shard = f"{prefix}shard{wire.shard if self.shards == wire.shards else 0}"
        filled = self._read(wire, prefix, [*VECTORS, *_REPLICA_VECTORS], {shard: b""})
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


def tensors_of(wire: ShardedState, vectors: list[Tensor] | None) -> dict[str, DTensor]:
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


def parse_header(content: Any) -> dict[str, Any]:
    """Return the header of one rank, which is read without running a pickle."""
    try:
        header = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        raise StateError(f"the state of one rank is damaged: {one_line(error)}") from error
    if not isinstance(header, dict):
        raise StateError(f"the state of one rank is a {type(header).__name__}, not a dictionary")
    check_sizes(header)
    return header


def check_place(
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


def checked(
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
    for field in VECTORS:
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
