"""Saving and loading what the replicas of a sharded model remember.

The format is torch.distributed.checkpoint's, with a DTensor a parameter:

    gradwire.replica<r>.residual.<parameter>     what replica r keeps (velocity likewise)
    gradwire.replica<r>.shard<s>                 the short rest of one rank, as bytes

Replicas keep different residuals: without the replica in the key, one would be saved for all.
"""

import io
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from gradwire import packing
from gradwire.errors import StateError

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
    rest = packing.header(wire) | {"user_skip": False, "delivered": [None] * len(wire.bundles)}
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
    _restore(wire, part, part[shard])


def save(wire: Any, path: Path) -> None:
    """See `gradwire.save`."""
    dcp.save({TOP: wire}, checkpoint_id=str(path))


@torch.no_grad()
def load(wire: Any, path: Path) -> None:
    """See `gradwire.load`. Finds the wire's part also in a checkpoint that holds more."""
    saved = Saved(path)
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
    _restore(wire, part, rest, same=saved.shards == wire.shards)


class Saved:
    """What a checkpoint folder holds for a wire."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            metadata = dcp.FileSystemReader(path).read_metadata()
        except FileNotFoundError:
            raise StateError(f"{path} holds no checkpoint: .metadata is not there") from None
        self._entries = metadata.state_dict_metadata
        pattern = re.compile(r"(.*\.)replica(\d+)\.shard(\d+)")
        found = [m.groups() for m in map(pattern.fullmatch, self._entries) if m]
        prefixes = {prefix for prefix, _, _ in found}
        if len(prefixes) != 1:
            raise StateError(f"{path} holds {len(prefixes)} states of a sharded wire, expected 1")
        self._prefix = prefixes.pop()
        self.replicas = 1 + max(int(replica) for _, replica, _ in found)
        self.shards = 1 + max(int(shard) for _, _, shard in found)

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
        shard = f"shard{wire.shard if self.shards == wire.shards else 0}"
        names = [p.name for unit in wire.units for p in unit.places]
        part: dict[str, Any] = {
            what: _tensors(wire, None)
            for what in VECTORS
            if f"{where}.{what}.{names[0]}" in self._entries
        }
        part[shard] = b""
        tree: dict[str, Any] = part
        for key in reversed(where.split(".")):
            tree = {key: tree}
        dcp.load(tree, checkpoint_id=str(self._path))
        # Bytes come back in the tree, tensors are filled in place.
        for key in where.split("."):
            tree = tree[key]
        local = {
            what: {name: tensor.to_local() for name, tensor in part[what].items()}
            for what in VECTORS
            if what in part
        }
        return local, tree[shard]


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


def _restore(wire: "ShardedWire", part: Mapping[str, Any], rest: bytes, same: bool = True) -> None:
    saved = torch.load(io.BytesIO(rest), map_location="cpu", weights_only=True)
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
    packing.restore(wire, saved)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
