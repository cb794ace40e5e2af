"""One rank under FSDP2."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import gradwire
from faults.sequences.answer import Vector, flat, local
from faults.sequences.ddp import DDPTrainer
from faults.sequences.net import Net
from faults.sequences.trainer import fp32_default


class FSDPTrainer(DDPTrainer):
    """One rank under FSDP2: each rank is a replica of one shard."""

    def _wrap(self, net: Net, unused: bool | None = None) -> nn.Module:
        mesh = DeviceMesh.from_group(self.place.alone, "cpu")
        for part in (net.other, net.second, net):
            fully_shard(part, mesh=mesh)
        return net

    def _attach(self, model: nn.Module, fields: dict[str, Any], scaler: Any) -> Any:
        return gradwire.attach(model, replicate_group=self.place.group, scaler=scaler, **fields)

    def _twin(self) -> Net:
        with fp32_default():
            twin = Net().to(self.dtype)
        with torch.no_grad():
            for mine, other in zip(twin.parameters(), self.weights, strict=True):
                mine.copy_(local(other))
        twin.on_backward = self.net.on_backward
        return twin

    def _pack_optimizer(self) -> bytes:
        # SGD without momentum has no state.
        return b""

    def do_no_sync(self, data: int, how: str) -> None:
        """Pass a micro-batch that waits: inside FSDP2, or with "all-reduce" in the residual."""
        switch = "set_requires_gradient_sync" if how == "sync" else "set_requires_all_reduce"
        getattr(self.model, switch)(False)
        try:
            self._backward(data)
        finally:
            getattr(self.model, switch)(True)
        self._note_own(data, True)
        if how == "all-reduce" and not self.wire.stopped:
            assert self.own is not None
            self.now.came, self.own = flat(self.own), None

    def do_step(self, data: int, without: tuple[int, ...] = (), **more: Any) -> None:
        # A unit that is left out would keep the micro-batches that wait inside FSDP2.
        super().do_step(data, () if self.own else without, **more)

    def do_load(
        self, folder: str, parameters: Vector | None = None, optimizer: bytes = b""
    ) -> None:
        own = self.own
        super().do_load(folder, parameters, optimizer)
        self.own = own  # FSDP2 does not forget the micro-batches that wait inside it
