"""Islands: ranks with fast links between them, which hold one copy of the model together.

Each rank of an island exchanges a part of the model with its counterparts in the other islands.
Together the ranks of an island send every entry once, over all their links at the same time.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gradwire.errors import AttachError
from gradwire.integrate.handshake import take_group
from gradwire.integrate.local_steps.parts import Parts, gather_everywhere
from gradwire.integrate.refuse import is_sharded, unwrap_ddp
from gradwire.ranks.distributed import DistributedGroup
from gradwire.ranks.group import Group

if TYPE_CHECKING:
    from gradwire.state.saved.cuts import Cut

_FIX = 'give mesh["replicate"].get_group(), one rank of each island'


def open_island(model: nn.Module, replicate_group: Any, timeout: timedelta) -> Parts:
    """Return this rank's part of a sharded or DDP-wrapped model, after the axes were checked.

    A collective call of all ranks of all islands.
    """
    # A model may be in both; a sharded one inside DDP is refused there.
    parts: Parts
    if is_sharded(model):
        from gradwire.integrate.local_steps.shards import ShardedParts, axes_of

        inside, axes = axes_of(model)
        device = torch.device(axes[0][1])
        check_islands(replicate_group, inside, [axis for axis, _ in axes], device)
        parts = ShardedParts(model)
        groups = [axis for axis, _ in axes]
    else:
        ddp = unwrap_ddp(model)
        groups = [ddp.process_group]
        inside = dist.get_process_group_ranks(groups[0])
        parts = CopiedParts(ddp)
        device = parts.device
        check_islands(replicate_group, inside, groups, device)
    parts.axes = [take_group(group, device, timeout) for group in groups]
    parts.place, parts.places = inside.index(dist.get_rank()), len(inside)
    return parts


def check_islands(
    replicate_group: Any,
    inside: Sequence[int],
    axes: Sequence[dist.ProcessGroup],
    device: torch.device,
) -> None:
    """Raise AttachError on every rank unless `replicate_group` is this rank's place in all islands.

    A collective call of all ranks of all islands.
    """
    said = _misfit(replicate_group, inside, device)
    inner = [DistributedGroup(axis, device) for axis in axes]
    texts = gather_everywhere(inner, said, device)
    if said := said or next((text for text in texts if text), ""):
        raise AttachError(said)


def _misfit(replicate_group: Any, inside: Sequence[int], device: torch.device) -> str:
    """Return words on what is wrong with the group, "" for nothing. Its ranks call it together."""
    rank = dist.get_rank()
    if replicate_group == dist.GroupMember.NON_GROUP_MEMBER:
        return f"rank {rank} is not in its replicate_group: {_FIX}"
    across = dist.get_process_group_ranks(replicate_group)
    common = sorted(set(across) & set(inside))
    said = ""
    if common != [rank]:
        said = (
            f"replicate_group {across} cuts the island {list(inside)} in two: it holds ranks "
            f"{common} of it, not one: {_FIX}"
        )
    row = [said, inside.index(rank), len(inside)]
    rows = gather_everywhere([DistributedGroup(replicate_group, device)], row, device)
    if said := said or next((text for text, _, _ in rows if text), ""):
        return said
    for other, (_, place, size) in zip(across, rows, strict=True):
        if size != rows[0][2]:
            return (
                f"islands of different sizes: rank {across[0]} is in one of {rows[0][2]} ranks, "
                f"rank {other} in one of {size}: give every island as many"
            )
        if place != rows[0][1]:
            return (
                f"replicate_group {across} joins different parts of the model: rank {across[0]} "
                f"is number {rows[0][1]} of its island, rank {other} number {place}: {_FIX}"
            )
    return ""


def replicas_of(replicate_group: Any) -> Any:
    """Return the process group of `replicate_group`; raise AttachError for another type."""
    group = replicate_group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise AttachError(f"replicate_group is a mesh of {group.ndim} axes: {_FIX}")
        group = group.get_group()
    if isinstance(group, dist.ProcessGroup) or group == dist.GroupMember.NON_GROUP_MEMBER:
        return group
    raise AttachError(
        f"replicate_group must be a process group, got {type(group).__name__}: {_FIX}"
    )


class CopiedParts(Parts):
    """The weights of a DDP-wrapped model, of which every rank of the island holds a copy.

    Rank j of n exchanges the j-th of n equal stretches of every parameter, and then the ranks of
    the island gather the stretches. So an island sends every entry once, by n links at the same
    time, and x, momentum and residual take 1/n of their memory on each rank. Were all ranks to
    exchange everything, the slow link would carry n times the bytes. Were one rank to do so and to
    broadcast, the other links would be idle. The copies stay bit-identical: each rank gets every
    stretch from the rank that computed it.
    """

    kind = "ddp"
    puts_together = True

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def held(self, name: str) -> Tensor:
        return self._stretch(self.parameters[name])

    def _stretch(self, tensor: Tensor) -> Tensor:
        """Return this rank's stretch of a tensor, flat; the last ones may be shorter or empty."""
        length = -(-tensor.numel() // self.places)
        return tensor.detach().reshape(-1)[self.place * length :][:length]

    @torch.no_grad()
    def put(self, values: Mapping[str, Tensor]) -> None:
        kinds: dict[torch.dtype, list[str]] = {}
        for name in values:
            kinds.setdefault(self.parameters[name].dtype, []).append(name)
        for dtype, names in kinds.items():
            rounded = {name: values[name].to(dtype) for name in names}
            for name, whole in self.join(rounded).items():
                self.parameters[name].detach().copy_(whole)

    def join(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the whole parameters, gathered from all ranks of the island. All of one dtype."""
        if not values:
            return {}
        targets = {name: self.parameters[name] for name in values}
        return dict(
            zip(values, self._gathered(list(values.values()), targets.values()), strict=True)
        )

    def _gathered(self, parts: Sequence[Tensor], like: Iterable[Tensor]) -> list[Tensor]:
        """Return whole tensors of the shapes of `like`, of which `parts` are this rank's."""
        targets = list(like)
        lengths = [-(-t.numel() // self.places) for t in targets]
        row = parts[0].new_zeros(sum(lengths))
        for place, part in zip(row.split(lengths), parts, strict=True):
            place[: part.numel()].copy_(part)
        table = row[None] if self.places == 1 else self._gather_bytes(row)
        columns = table.split(lengths, dim=1)
        return [
            column.reshape(-1)[: t.numel()].view(t.shape)
            for column, t in zip(columns, targets, strict=True)
        ]

    def _gather_bytes(self, row: Tensor) -> Tensor:
        """Return every rank's row. As bytes, because Gloo does not know every dtype."""
        (axis,) = self.axes
        return axis.all_gather(row.view(torch.uint8)).view(row.dtype)

    def cuts(self) -> "dict[str, Cut]":
        """Return by name flat stretches, which torch cuts in the same way."""
        from torch.distributed.tensor import Shard

        from gradwire.state.saved.cuts import Cut

        (axis,) = self.axes
        mesh = DeviceMesh.from_group(axis.process_group, self.device.type)
        return {
            name: Cut((self.held(name).numel(),), mesh, (Shard(0),), (p.numel(),), (1,))
            for name, p in self.parameters.items()
        }

    def memory(self) -> dict[str, Tensor]:
        whole = {name: p.detach() for name, p in self.parameters.items()}
        return whole | dict(self.model.named_buffers())

    @torch.no_grad()
    def spread(self, group: Group) -> None:
        tensors = self._floating()
        if not self._differ(tensors, group):
            return
        for tensor in tensors:
            part = self._stretch(tensor).clone()
            if part.numel():
                term = part if group.rank == 0 else torch.zeros_like(part)
                part = group.all_reduce(term)
            tensor.copy_(self._gathered([part], [tensor])[0])
