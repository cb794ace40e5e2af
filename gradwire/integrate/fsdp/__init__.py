"""attach_sharded: compress the all-reduce over the replicas of a model that FSDP2 shards."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from gradwire.accumulate import Bundle
from gradwire.config import Config
from gradwire.errors import AttachError, ConfigError, GradwireError
from gradwire.integrate.attached import Attached, Attachment
from gradwire.integrate.fsdp.axes import check_axes, replica_group
from gradwire.integrate.fsdp.engine import ShardedEngine
from gradwire.integrate.fsdp.units import Unit, sharded_parameters, units_of
from gradwire.integrate.handshake import compare_settings, handshake, take_group
from gradwire.integrate.versions import note_torch
from gradwire.ranks.distributed import DistributedGroup
from gradwire.ranks.group import Group
from gradwire.ranks.together import raise_together
from gradwire.state.drift import Watch
from gradwire.state.names import unwrapped
from gradwire.state.saved import sharded
from gradwire.state.saved.cuts import Cut, MoreSaved
from gradwire.torch_internals import (
    all_reduce_hook,
    check_sharded_steps,
    module_of,
    reduce_device,
    shard,
    shard_group,
    shard_size,
)
from gradwire.types import Slot


class _UnitHook:
    """The all-reduce hook of one unit: passes flat shards to the wire, or averages densely.

    Only the model holds its hooks, and no table holds the model, so both can be freed together.
    """

    def __init__(self, attachment: "Attachment[ShardedWire]", index: int) -> None:
        self.attachment = attachment
        self._index = index

    def __call__(self, flat: Tensor) -> None:
        if flat.is_cuda:
            # FSDP2 may free the flat shard while this stream still works on it.
            flat.record_stream(torch.cuda.current_stream(flat.device))
        wire = self.attachment.wire
        if wire is not None and not wire.engine.begun:
            self.attachment.release_flushed()
            wire = self.attachment.wire
        if wire is None:
            dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=self.attachment.process_group)
        else:
            wire.engine.hook(wire.units[self._index], flat)


class _ShardWatch(Watch):
    """A drift watch that compares the replicas' shards.

    Shards keep their memory while FSDP2 gathers whole parameters.
    """

    def _watched(self) -> dict[str, Tensor]:
        model = self._model()
        assert model is not None, "a step of a model that is gone"
        parameters = sharded_parameters(model)
        return {name: shard(p).to_local() for name, p in parameters.items()}


class ShardedWire(Attached):
    """The handle that `attach` returns for a sharded model. Its ranks are the replicas."""

    sharded = True
    has_whole_moments = False
    """True: every rank has the whole moments of its optimiser."""
    engine: ShardedEngine

    def __init__(
        self, model: nn.Module, units: list[Unit], config: Config | None, **fields: Any
    ) -> None:
        super().__init__(config, model=model, **fields)
        self.units = units
        self.by_unit: dict[int, list[Bundle]] = {}
        """By index of a unit, the bundles."""
        self.unsent_units: set[int] = set()
        """After `detach`: the units that may still have a residual."""
        self.shard, self.shards = 0, 1
        """The number of this rank's shard, and the number of shards."""
        if self.config.watch:
            self.watch = _ShardWatch(model, self.config.watch)

    @property
    def inner_groups(self) -> Sequence[Group]:
        """The ranks that hold the shards of this rank's replica, as one group."""
        return [self.engine.shard_ranks]

    def cuts(self) -> dict[str, Cut]:
        """Return by name the way in which FSDP2 cuts each parameter."""
        return {
            slot.name: Cut.of(shard(slot.parameter), shard_size(slot.parameter))
            for unit in self.units
            for slot in unit.shard_slots
        }

    def check_kind(self, header: Mapping[str, Any]) -> None:
        """Accept a folder of any wire; `check_more` refuses those of local steps."""

    def more_saved(self) -> MoreSaved:
        """Return what is saved beside residuals: nothing."""
        return MoreSaved()

    def adopt_vectors(self, saved: dict[str, Any], part: Mapping[str, Any]) -> None:
        """Take nothing more from a folder than residuals and momentum."""

    def rebundle(self, bundles: Sequence[Sequence[Slot]]) -> None:
        """Make the bundles, without the parameters that this shard has no entry of."""
        filled = [[slot for slot in slots if slot.numel] for slots in bundles]
        super().rebundle([slots for slots in filled if slots])
        self.by_unit = {}
        for bundle in self.bundles:
            self.by_unit.setdefault(bundle.slots[0].unit, []).append(bundle)

    @property
    def last_skipped(self) -> Tensor:
        """True (0-d): the optimiser skipped the step before this one; known as this one begins."""
        return self.status.skipped

    def mark_last_skipped(self) -> None:
        """Put back the deliveries of a step that never reached the optimiser."""
        self.status.by_user = True
        self.unsent_units |= self.engine.processed.keys()

    def detach(self) -> None:
        super().detach()
        self.unsent_units = {unit.index for unit in self.units}

    def leave(self) -> None:
        super().leave()
        self.engine.shard_ranks.leave(shard_group(self.units[0].group))

    def _has_withheld(self, taken: bool) -> bool:
        # By unit, and not by residual, because a shard without residuals must decide alike.
        done = self.engine.processed.keys()
        self.unsent_units = self.unsent_units - done if taken else self.unsent_units | done
        return bool(self.unsent_units)

    def _withheld(self) -> Iterator[tuple[str, Tensor]]:
        for index in self.unsent_units:
            for bundle in self.by_unit.get(index, []):
                yield from ((slot.name, bundle.view(bundle.u, slot)) for slot in bundle.slots)

    def residual(self, name: str) -> Tensor:
        """Return a copy of this rank's residual of its shard of one parameter, fp32."""
        for unit in self.units:
            for slot in unit.shard_slots:
                if slot.name == name and not slot.numel:
                    # An empty shard is in no bundle.
                    size = shard_size(slot.parameter)
                    return torch.zeros(size, dtype=torch.float32, device=self.device)
        return super().residual(name)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for torch.distributed.checkpoint; keys name replica and parameter."""
        return sharded.state_dict(self)

    def load_state_dict(self, state: Any) -> None:
        """Continue where `state_dict` was taken, with as many replicas and shards.

        `gradwire.load` can change both numbers.
        """
        sharded.load_state_dict(self, state)


def attach_sharded(
    model: nn.Module, config: Config | None, replicate_group: Any, fields: dict[str, Any]
) -> ShardedWire:
    """Attach a wire to the replicas of a sharded model; see `gradwire.attach`."""
    root = _sharded_root(model)
    note_torch(stacklevel=5)
    check_sharded_steps(root)
    units = units_of(root)
    replicas = replica_group(replicate_group)
    device = reduce_device(units[0].group)
    check_axes(replicas, shard_group(units[0].group), device)
    _refuse_hooked(units)
    wire = ShardedWire(root, units, config, process_group=replicas, **fields)
    _open_wire(wire, root, device)
    _broadcast_parameters(wire, root)
    attachment = Attachment(replicas, wire)
    for unit in units:
        module_of(unit.group).set_all_reduce_hook(_UnitHook(attachment, unit.index))
    return wire


def _sharded_root(model: object) -> Any:
    """Return the FSDPModule inside `model`, which may be compiled; raise for anything else."""
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
        if isinstance(hook, _UnitHook):
            hook.attachment.refuse_attached()
        elif hook is not None:
            raise AttachError(
                f"{unit.name or 'the root'} has an all-reduce hook already, and FSDP takes only one"
            )


def _open_wire(wire: ShardedWire, root: FSDPModule, device: torch.device) -> None:
    """Compare settings with the replicas, then with the other shards.

    An error on one rank becomes an error on all ranks.
    """
    slots = [slot for unit in wire.units for slot in unit.slots()]
    holders = shard_group(wire.units[0].group)
    shard_ranks = take_group(holders, device, timedelta(seconds=wire.config.timeout))
    error: GradwireError | None = None
    try:
        settings = wire.status.handshake_settings()
        group = handshake(wire.process_group, wire.config, slots, device, settings)
        if not any(slot.numel for slot in slots):
            raise ConfigError(
                f"shard {shard_ranks.rank} of {shard_ranks.size} holds no entry of the model: "
                f"use fewer"
            )
        wire.open(slots, device, group)
    except GradwireError as failure:
        error = failure
    fields = wire.config.asdict() | wire.status.handshake_settings()
    try:
        who = f"shard {{rank}} of {shard_ranks.size} failed"
        raise_together(shard_ranks, error, ConfigError, who=who)
        parameters = [[slot.name, str(slot.dtype)] for slot in slots]
        compare_settings(shard_ranks, fields | {"parameters": parameters})
    except GradwireError:
        shard_ranks.leave(holders)
        if error is None:
            group.leave(wire.process_group)
        raise
    shard_ranks.open_mailbox()
    wire.shard, wire.shards = shard_ranks.rank, shard_ranks.size
    wire.engine = ShardedEngine(wire, root, wire.units, shard_ranks)
    weakref.finalize(wire, shard_ranks.leave, None).atexit = False


@torch.no_grad()
def _broadcast_parameters(wire: ShardedWire, root: nn.Module) -> None:
    """Send the first replica's parameters, frozen ones too, to the other replicas."""
    assert isinstance(wire.group, DistributedGroup)
    group = wire.group.process_group
    for parameter in sharded_parameters(root).values():
        local = shard(parameter).to_local()
        if local.numel():
            first = local.to(wire.device, copy=True)
            dist.broadcast(first, group=group, group_src=0)
            local.copy_(first)
