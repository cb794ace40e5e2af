"""What FSDP2 reduces in one go: the parameters behind one all-reduce hook.

FSDP2 tells a hook nothing but the flat shard, so its own lists are read.
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

NATIVE = """\
this model is sharded on a 2-D mesh, whose dense all-reduce over replicas runs before any hook. \
Shard it on one axis and give the other one to attach:
    mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    wire = gradwire.attach(model, replicate_group=mesh["replicate"].get_group(), density=0.001)"""


@dataclass(frozen=True)
class Place:
    """Where a parameter's shard is in the flat shard of its unit."""

    name: str
    start: int
    numel: int
    parameter: Any


class Unit:
    """One FSDPModule with parameters of its own, and how its flat shard is laid out."""

    def __init__(self, index: int, name: str, group: Any, names: dict[int, str]) -> None:
        self.index = index
        self.name = name
        self.group = group
        self.places: list[Place] = []
        self.length = 0
        for parameter in members(group):
            if shard(parameter).requires_grad:
                self._append(parameter, names)
        filled = [place for place in self.places if place.numel]
        self.smallest = min(filled, key=lambda place: place.numel, default=None)

    def _append(self, parameter: Any, names: dict[int, str]) -> None:
        place = Place(
            _name(parameter, names), self.length, shard_size(parameter).numel(), parameter
        )
        self.places.append(place)
        # FSDP pads the first dimension to a multiple of the number of shards.
        self.length += padded_shard_size(parameter).numel()

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype of the flat shard that the hook gets."""
        return reduce_dtype(self.group, self.places[0].parameter)

    def slots(self) -> list[Slot]:
        """One slot a parameter, in the narrowest dtype on the way to the optimiser.

        After the hook FSDP rounds to the parameter's dtype: rounded here, the loss is not lost.
        """
        return [
            Slot(
                place.name,
                tuple(shard_size(place.parameter)),
                shard_stride(place.parameter),
                min(self.reduce_dtype, shard(place.parameter).dtype, key=_width),
                numel=place.numel,
                unit=self.index,
            )
            for place in self.places
        ]

    def parts(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters' shards, without padding; raises unless `flat` holds all of them."""
        if flat.numel() != self.length or flat.dtype != self.reduce_dtype:
            raise AttachError(
                f"{self.name or 'the root'} handed over {flat.numel()} entries of {flat.dtype}, "
                f"expected {self.length} of {self.reduce_dtype}: every parameter needs a gradient "
                f"in every step (set_reduce_scatter_unused_params(True), from torch 2.12), and "
                f"freezing or another dtype needs a new attach"
            )
        return {p.name: flat[p.start : p.start + p.numel] for p in self.places}

    @property
    def holds(self) -> bool:
        """Whether more micro-batches follow before the optimiser's step."""
        return not (reduces_now(self.group) and is_last_backward(module_of(self.group)))


def _width(dtype: torch.dtype) -> int:
    return dtype.itemsize


def units_of(model: nn.Module) -> list[Unit]:
    """The units of a sharded model, in the order of its modules; refuses what cannot work."""
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
            if unit.places:
                _refuse_unit(unit)
                units.append(unit)
    if not units:
        raise AttachError("the model has no parameter that needs a gradient")
    return units


def sharded_parameters(model: nn.Module) -> dict[str, Any]:
    """FSDP2's record of every parameter it shards, frozen ones too, by name."""
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
        raise AttachError(NATIVE)
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
    for place in unit.places:
        parameter = shard(place.parameter)
        if parameter.device.type == "meta":
            raise AttachError(f"{place.name} is on the meta device: materialise the model first")
        if gradient_dtype(place.parameter) not in (None, parameter.dtype):
            raise AttachError(
                f"{place.name} has grad_dtype {gradient_dtype(place.parameter)}, the parameter "
                f"is {parameter.dtype}: leave grad_dtype as it is"
            )
        if is_tensor_parallel(place.parameter):
            raise AttachError(
                f"{place.name} is sharded by tensor parallelism too: not supported yet"
            )
        pair = (parameter.dtype, unit.reduce_dtype)
        if not set(pair) <= set(DTYPES) or pair == (torch.float16, torch.bfloat16):
            raise AttachError(
                f"{place.name} is {pair[0]} and reduced in {pair[1]}; residuals are fp32: use fp32 "
                f"or bf16, and reduce fp16 in fp32"
            )
