"""ShardedParts: this rank's shards of a model that fully_shard cut over the ranks of an island."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gradwire.errors import AttachError
from gradwire.integrate.fsdp.units import sharded_parameters
from gradwire.integrate.local_steps.parts import Parts
from gradwire.state.names import plain_name, unwrapped
from gradwire.state.saved.cuts import Cut
from gradwire.torch_internals import averages_replicas, param_groups, shard

_REPLICAS = """\
this model is sharded on a mesh that holds the islands too, so FSDP2 averages over them at every \
step. Shard it on the island's axis and give the other one to local_steps:
    mesh = init_device_mesh("cuda", (islands, ranks), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    local_steps(model, optimizer, replicate_group=mesh["replicate"].get_group(), every=5)"""


class ShardedParts(Parts):
    """The shards of a model that FSDP2 cut, perhaps together with tensor parallelism.

    Every rank exchanges the shards that it holds. A parameter that tensor parallelism leaves whole
    lies on several ranks, which must exchange the same: it never shares a bundle with others.
    """

    kind = "fsdp2"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        records = sharded_parameters(self.model).values()
        by_id = {id(shard(record)): record for record in records}
        # In the model's order; FSDP2 lists the root's parameters first. A tied one has two names.
        self._records = {
            plain_name(name): by_id[id(p)] for name, p in self.model.named_parameters()
        }
        trained = {n: shard(r) for n, r in self._records.items() if shard(r).requires_grad}
        self.parameters = trained
        axes = _largest_mesh(trained).ndim
        self.whole = frozenset(name for name, p in trained.items() if _cuts(p) < axes)

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def held(self, name: str) -> Tensor:
        local: Tensor = self.like(name).to_local()
        return local.detach()

    def like(self, name: str) -> DTensor:
        """Return the parameter as the DTensor that the optimiser steps."""
        parameter: DTensor = shard(self._records[name])
        return parameter

    def refresh(self) -> None:
        # After a forward pass without a backward pass FSDP2 keeps the gathered root.
        reshard(self.model)

    def join(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parts as DTensors, sharded as the parameters are."""
        return {name: self.as_sharded(name, value) for name, value in values.items()}

    def cuts(self) -> dict[str, Cut]:
        return {name: Cut.of(self.like(name), self.held(name).shape) for name in self.parameters}

    def as_sharded(self, name: str, local: Tensor) -> DTensor:
        """Return a DTensor that is sharded as a parameter, with this local part."""
        return Cut.of(self.like(name), local.shape).wrap(local)

    def _everything(self) -> Iterable[Tensor]:
        locals_ = [shard(record).to_local() for record in self._records.values()]
        return [*locals_, *self.model.buffers()]


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, so that the next forward pass gathers the shards again."""
    for module in unwrapped(model).modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_sharded_module(module: object) -> bool:
    """Return True if fully_shard was called on this module."""
    return isinstance(module, FSDPModule)


def refuse_shards(model: nn.Module) -> None:
    """Raise AttachError for a sharded model that islands cannot serve. It is resharded before."""
    root = unwrapped(model)
    if not is_sharded_module(root):
        raise AttachError(
            "parts of the model are sharded: call fully_shard on the whole model too, last"
        )
    for module in root.modules():
        if is_sharded_module(module) and any(map(averages_replicas, param_groups(module))):
            raise AttachError(_REPLICAS)
    reshard(root)
    for name, parameter in root.named_parameters():
        if not parameter.requires_grad:
            continue
        if not isinstance(parameter, DTensor):
            raise AttachError(
                f"{name} is left out of fully_shard: every trained parameter must be sharded"
            )
        if parameter.device.type == "meta":
            raise AttachError(f"{name} is on the meta device: materialise the model first")
        if parameter.device.type != parameter.device_mesh.device_type:
            raise AttachError(
                f"{name} is on {parameter.device.type}, its mesh on "
                f"{parameter.device_mesh.device_type}: leave CPUOffloadPolicy out"
            )


def axes_of(model: nn.Module) -> tuple[list[int], list[tuple[dist.ProcessGroup, str]]]:
    """Return the ranks of the island, and the group and device along each of its axes."""
    records = sharded_parameters(unwrapped(model))
    mesh = _largest_mesh({n: shard(r) for n, r in records.items() if shard(r).requires_grad})
    axes = [(mesh.get_group(axis), mesh.device_type) for axis in range(mesh.ndim)]
    return mesh.mesh.flatten().tolist(), axes


def _largest_mesh(parameters: Mapping[str, Any]) -> DeviceMesh:
    """Return the mesh with most axes; raise AttachError if another one is no part of it."""
    if not parameters:
        raise AttachError("the model has no parameter that needs a gradient")
    meshes = {name: p.device_mesh for name, p in parameters.items()}
    largest: DeviceMesh = max(meshes.values(), key=lambda mesh: mesh.ndim)
    ranks = [set(dist.get_process_group_ranks(largest.get_group(i))) for i in range(largest.ndim)]
    for name, mesh in meshes.items():
        own = [set(dist.get_process_group_ranks(mesh.get_group(i))) for i in range(mesh.ndim)]
        if any(axis not in ranks for axis in own):
            raise AttachError(
                f"{name} is sharded on another mesh than the other parameters: local steps need "
                f"one mesh inside an island"
            )
    return largest


def _cuts(parameter: Any) -> int:
    """Return the number of axes along which a parameter is cut."""
    return sum(not placement.is_replicate() for placement in parameter.placements)
