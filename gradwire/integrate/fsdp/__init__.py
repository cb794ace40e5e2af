"""Replicas of a model that FSDP2 shards: hybrid sharding, with a compressed all-reduce."""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from gradwire.accumulate import Bundle
from gradwire.config import Config
from gradwire.errors import AttachError, ConfigError, GradwireError
from gradwire.integrate.adam import warn_of_adam
from gradwire.integrate.attached import Attached
from gradwire.integrate.fsdp.axes import check_axes, group_of, own_group
from gradwire.integrate.fsdp.shards import Shards
from gradwire.integrate.fsdp.units import Unit, sharded_parameters, units_of
from gradwire.integrate.handshake import compare, meet
from gradwire.integrate.versions import note_torch
from gradwire.ranks.group import DistributedGroup
from gradwire.ranks.together import raise_together
from gradwire.state.drift import Watch
from gradwire.state.names import unwrapped
from gradwire.state.saved import sharded
from gradwire.torch_internals import (
    all_reduce_hook,
    check_sharded_steps,
    device_of,
    module_of,
    shard,
    shard_group,
    shard_size,
)
from gradwire.types import Slot


class Port:
    """What FSDP2's hooks call: it passes flat shards to the wire, or averages them itself."""

    def __init__(self, replicas: dist.ProcessGroup, wire: "ShardedWire") -> None:
        self.replicas = replicas
        self.wire: ShardedWire | None = wire

    def __call__(self, index: int, flat: Tensor) -> None:
        if flat.is_cuda:
            # FSDP2 may free it while this stream still works on it.
            flat.record_stream(torch.cuda.current_stream(flat.device))
        wire = self.wire
        if wire is not None and wire.detaching and not wire.engine.begun and wire.flushed():
            wire.let_go()
            self.wire = wire = None
        if wire is None:
            dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=self.replicas)
        else:
            wire.engine.hook(wire.units[index], flat)


class Hook:
    """One unit's all-reduce hook. The model holds it, and nothing else holds the model."""

    def __init__(self, port: Port, index: int) -> None:
        self.port = port
        self._index = index

    def __call__(self, flat: Tensor) -> None:
        self.port(self._index, flat)


class ShardWatch(Watch):
    """Compares the replicas' shards, which stay where they are while FSDP2 gathers parameters."""

    def _watched(self) -> dict[str, Tensor]:
        model = self._model()
        assert model is not None, "a step of a model that is gone"
        parameters = sharded_parameters(model)
        return {name: shard(p).to_local() for name, p in parameters.items()}


class ShardedWire(Attached):
    """The handle that `attach` returns for a sharded model. Its ranks are the replicas."""

    sharded = True
    engine: Shards

    def __init__(
        self, model: nn.Module, units: list[Unit], config: Config | None, **fields: Any
    ) -> None:
        super().__init__(config, model=model, **fields)
        self.units = units
        self.by_unit: dict[int, list[Bundle]] = {}
        self.unsent: set[int] = set()
        """After `detach`: the units that something may be kept for."""
        self.shard, self.shards = 0, 1
        """This rank's part of the model, and how many there are."""
        if self.config.watch:
            self.watch = ShardWatch(model, self.config.watch)

    def rebundle(self, bundles: Sequence[Sequence[Slot]]) -> None:
        """A shard may hold nothing of a small parameter: that takes no part."""
        filled = [[slot for slot in slots if slot.numel] for slots in bundles]
        super().rebundle([slots for slots in filled if slots])
        self.by_unit = {}
        for bundle in self.bundles:
            self.by_unit.setdefault(bundle.slots[0].unit, []).append(bundle)

    @property
    def last_skipped(self) -> Tensor:
        """Whether the step before this one was skipped, as this one found when it began."""
        return self.status.skipped

    def put_back(self) -> None:
        """What the last step delivered never reached the optimiser."""
        self.status.by_user = True
        self.unsent |= self.engine.processed.keys()

    def detach(self) -> None:
        super().detach()
        self.unsent = {unit.index for unit in self.units}

    def leave(self) -> None:
        super().leave()
        self.engine.shards.leave(shard_group(self.units[0].group))

    def _waits(self, taken: bool) -> bool:
        """By unit, not by what is kept here: a shard that holds nothing waits with the others."""
        done = self.engine.processed.keys()
        self.unsent = self.unsent - done if taken else self.unsent | done
        return bool(self.unsent)

    def _left(self) -> Iterator[tuple[str, Tensor]]:
        for index in self.unsent:
            for bundle in self.by_unit.get(index, []):
                yield from ((slot.name, bundle.view(bundle.u, slot)) for slot in bundle.slots)

    def residual(self, name: str) -> Tensor:
        """A copy of this rank's residual of its shard of one parameter, fp32."""
        for unit in self.units:
            for place in unit.places:
                if place.name == name and not place.numel:
                    size = shard_size(place.parameter)
                    return torch.zeros(size, dtype=torch.float32, device=self.device)
        return super().residual(name)

    def state_dict(self) -> dict[str, Any]:
        """For torch.distributed.checkpoint: by parameter, with the replica in the key."""
        return sharded.state_dict(self)

    def load_state_dict(self, state: Any) -> None:
        """Continue where `state_dict` was taken, with as many replicas and shards.

        `gradwire.load` can change both numbers.
        """
        sharded.load_state_dict(self, state)


def attach_sharded(
    model: nn.Module, config: Config | None, replicate_group: Any, fields: Any
) -> ShardedWire:
    """See `attach`."""
    root = _root(model)
    note_torch()
    check_sharded_steps(root)
    units = units_of(root)
    replicas = group_of(replicate_group)
    device = device_of(units[0].group)
    check_axes(replicas, shard_group(units[0].group), device)
    _refuse_hooked(units)
    wire = ShardedWire(root, units, config, process_group=replicas, **fields)
    _open(wire, root, device)
    _broadcast(wire, root)
    if fields.get("optimizer") is not None:
        warn_of_adam(wire, [fields["optimizer"]])
    port = Port(replicas, wire)
    for unit in units:
        module_of(unit.group).set_all_reduce_hook(Hook(port, unit.index))
    return wire


def _root(model: object) -> Any:
    inner = unwrapped(model) if isinstance(model, nn.Module) else model
    if isinstance(inner, FSDPModule):
        return inner
    hint = 'call fully_shard(model, mesh=mesh["shard"]) first'
    if isinstance(model, nn.parallel.DistributedDataParallel):
        hint = "DistributedDataParallel has a process group of its own: leave replicate_group out"
    elif isinstance(inner, FullyShardedDataParallel):
        hint = "FSDP1 has no such hook: use fully_shard in its place"
    elif isinstance(inner, nn.Module) and any(isinstance(m, FSDPModule) for m in inner.modules()):
        hint = "parts of it are sharded: call fully_shard on the whole model too, last"
    raise AttachError(
        f"replicate_group needs a model sharded by fully_shard, got {type(model).__name__}: {hint}"
    )


def _refuse_hooked(units: Sequence[Unit]) -> None:
    for unit in units:
        hook = all_reduce_hook(unit.group)
        if isinstance(hook, Hook) and hook.port.wire is not None:
            raise AttachError(
                "this model is attached already: call wire.detach() and take a step first"
            )
        if hook is not None and not isinstance(hook, Hook):
            raise AttachError(
                f"{unit.name or 'the root'} has an all-reduce hook already, and FSDP takes only one"
            )


def _open(wire: ShardedWire, root: FSDPModule, device: torch.device) -> None:
    """Meet the replicas, then the other shards; an error on one rank is an error on all."""
    slots = [slot for unit in wire.units for slot in unit.slots()]
    holders = shard_group(wire.units[0].group)
    shards = own_group(holders, device, timedelta(seconds=wire.config.timeout))
    error: GradwireError | None = None
    try:
        group = meet(
            wire.process_group, wire.config, slots, device, wire.status.handshake_settings()
        )
        if not any(slot.numel for slot in slots):
            raise ConfigError(
                f"shard {shards.rank} of {shards.size} holds no entry of the model: use fewer"
            )
        wire.open(slots, device, group)
    except GradwireError as failure:
        error = failure
    fields = wire.config.asdict() | wire.status.handshake_settings()
    try:
        raise_together(shards, error, ConfigError, who=f"shard {{rank}} of {shards.size} failed")
        compare(shards, fields | {"parameters": [[s.name, str(s.dtype)] for s in slots]})
    except GradwireError:
        shards.leave(holders)
        if error is None:
            group.leave(wire.process_group)
        raise
    wire.shard, wire.shards = shards.rank, shards.size
    wire.engine = Shards(wire, root, wire.units, shards)


@torch.no_grad()
def _broadcast(wire: ShardedWire, root: nn.Module) -> None:
    """Every replica starts from the parameters of the first, frozen ones too."""
    assert isinstance(wire.group, DistributedGroup)
    group = wire.group.process_group
    for parameter in sharded_parameters(root).values():
        local = shard(parameter).to_local()
        if local.numel():
            first = local.to(wire.device, copy=True)
            dist.broadcast(first, group=group, group_src=0)
            local.copy_(first)
