"""Unit: the parameters that FSDP2 reduces at once, behind one all-reduce hook.

A hook gets nothing but the flat shard, so the layout is read from FSDP2's private lists.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from gradwire.errors import AttachError
from gradwire.integrate.refuse import DTYPES
from gradwire.state.names import plain_name
from gradwire.torch_internals import (
    averages_replicas,
    divides_after_hook,
    gradient_dtype,
    is_last_backward,
    is_tensor_parallel,
    members,
    module_of,
    owner_of,
    padded_shard_size,
    param_groups,
    reduce_dtype,
    reduces_now,
    shard,
    shard_size,
    shard_stride,
)
from gradwire.types import Slot

_TWO_AXES = """\
this model is sharded on a 2-D mesh, whose dense all-reduce over replicas runs before any hook. \
Shard it on one axis and give the other one to attach:
    mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    wire = gradwire.attach(model, replicate_group=mesh["replicate"].get_group(), density=0.001)"""


@dataclass(frozen=True)
class ShardSlot:
    """The part of a unit's flat shard that belongs to one parameter.

    parameter: FSDP2's record of the parameter.
    """

    name: str
    start: int
    numel: int
    parameter: Any


class Unit:
    """The parameters of one FSDPModule, and the layout of their flat shard."""

    def __init__(self, index: int, name: str, group: Any, names: dict[int, str]) -> None:
        self.index = index
        self.name = name
        self.group = group
        self.shard_slots: list[ShardSlot] = []
        self.length = 0
        """The entries of the flat shard, with padding."""
        for parameter in members(group):
            if shard(parameter).requires_grad:
                self._append(parameter, names)
        filled = [slot for slot in self.shard_slots if slot.numel]
        self.smallest = min(filled, key=lambda slot: slot.numel, default=None)
        """The smallest shard that is not empty; None if all are empty."""

    def _append(self, parameter: Any, names: dict[int, str]) -> None:
        name, numel = _name(parameter, names), shard_size(parameter).numel()
        self.shard_slots.append(ShardSlot(name, self.length, numel, parameter))
        # FSDP pads the first dimension to a multiple of the number of shards.
        self.length += padded_shard_size(parameter).numel()

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype of the flat shard that the hook gets."""
        return reduce_dtype(self.group, self.shard_slots[0].parameter)

    def slots(self) -> list[Slot]:
        """Return a slot per parameter, in the narrowest dtype on the way to the optimiser.

        After the hook FSDP2 rounds to the parameter's dtype. The rounding is done here instead,
        so that the residual keeps its error.
        """
        return [
            Slot(
                slot.name,
                tuple(shard_size(slot.parameter)),
                shard_stride(slot.parameter),
                min(self.reduce_dtype, shard(slot.parameter).dtype, key=_width),
                numel=slot.numel,
                unit=self.index,
            )
            for slot in self.shard_slots
        ]

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parameters' shards without padding; raise unless `flat` holds all of them."""
        if flat.numel() != self.length or flat.dtype != self.reduce_dtype:
            raise AttachError(
                f"{self.name or 'the root'} handed over {flat.numel()} entries of {flat.dtype}, "
                f"expected {self.length} of {self.reduce_dtype}: every parameter needs a gradient "
                f"in every step (set_reduce_scatter_unused_params(True), from torch 2.12), and "
                f"freezing or another dtype needs a new attach"
            )
        return {s.name: flat[s.start : s.start + s.numel] for s in self.shard_slots}

    @property
    def more_to_come(self) -> bool:
        """True: more micro-batches follow before the optimiser's step."""
        return not (reduces_now(self.group) and is_last_backward(module_of(self.group)))


def _width(dtype: torch.dtype) -> int:
    return dtype.itemsize


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units of a sharded model in the order of its modules, or raise AttachError."""
    names = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
    units: list[Unit] = []
    seen: set[int] = set()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in param_groups(module):
            name = names[id(module)]
            if id(group) in seen:
                continue
            seen.add(id(group))
            _refuse_group(name or "the root", module, group)
            unit = Unit(len(units), name, group, names)
            if unit.shard_slots:
                _refuse_unit(unit)
                units.append(unit)
    if not units:
        raise AttachError("the model has no parameter that needs a gradient")
    return units


def sharded_parameters(model: nn.Module) -> dict[str, Any]:
    """Return FSDP2's record of every sharded parameter by name, frozen parameters too."""
    names = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
    return {
        _name(parameter, names): parameter
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in param_groups(module)
        for parameter in members(group)
    }


def _name(parameter: Any, names: dict[int, str]) -> str:
    module, name = owner_of(parameter)
    return plain_name(f"{names[id(module)]}.{name}".lstrip("."))


def _refuse_group(name: str, module: FSDPModule, group: Any) -> None:
    if averages_replicas(group):
        raise AttachError(_TWO_AXES)
    if len(param_groups(module)) > 1:
        raise AttachError(f"{name}: its parameters are on several meshes; hooks need a single one")
    if divides_after_hook(group):
        raise AttachError(
            f"{name}: set_force_sum_reduction_for_comms divides after the hook; leave it off"
        )


def _refuse_unit(unit: Unit) -> None:
    if unit.reduce_dtype == torch.float16:
        raise AttachError(
            f"{unit.name or 'the root'}: gradients are reduced in fp16, which FSDP divides after "
            f"the hook; use MixedPrecisionPolicy(reduce_dtype=torch.float32)"
        )
    for slot in unit.shard_slots:
        parameter = shard(slot.parameter)
        if parameter.device.type == "meta":
            raise AttachError(f"{slot.name} is on the meta device: materialise the model first")
        if gradient_dtype(slot.parameter) not in (None, parameter.dtype):
            raise AttachError(
                f"{slot.name} has grad_dtype {gradient_dtype(slot.parameter)}, the parameter "
                f"is {parameter.dtype}: leave grad_dtype as it is"
            )
        if is_tensor_parallel(slot.parameter):
            raise AttachError(
                f"{slot.name} is sharded by tensor parallelism too: not supported yet"
            )
        pair = (parameter.dtype, unit.reduce_dtype)
        if not set(pair) <= set(DTYPES) or pair == (torch.float16, torch.bfloat16):
            raise AttachError(
                f"{slot.name} is {pair[0]} and reduced in {pair[1]}; residuals are fp32: use fp32 "
                f"or bf16, and reduce fp16 in fp32"
            )
