"""The cut of a parameter over the ranks of a replica, and what a sharded state saves by it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from gradwire.integrate.fsdp import ShardedWire
    from gradwire.integrate.local_steps.handle import LocalSteps

ShardedState: TypeAlias = Union["ShardedWire", "LocalSteps"]
"""A state whose model several ranks hold together: FSDP2's replicas, and local steps' islands."""


@dataclass(frozen=True)
class Cut:
    """A parameter as the ranks of a replica cut it.

    shape: that of this rank's part. size, stride: those of the whole.
    """

    shape: Sequence[int]
    mesh: Any
    placements: Sequence[Any]
    size: Sequence[int]
    stride: Sequence[int]

    @classmethod
    def of(cls, like: DTensor, shape: Sequence[int]) -> "Cut":
        """Return the cut of a parameter that is a DTensor."""
        return cls(shape, like.device_mesh, like.placements, like.size(), like.stride())

    def wrap(self, local: Tensor) -> DTensor:
        """Return the DTensor of which `local` is this rank's part."""
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(self.size),
            stride=tuple(self.stride),
        )


@dataclass(frozen=True)
class MoreSaved:
    """Entries of a folder beside residuals and headers.

    vectors: by field and name, DTensors and whole tensors of this replica. shared: those that all
    replicas have alike. header: more entries of the header.
    """

    vectors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    shared: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    header: Mapping[str, Any] = field(default_factory=dict)
