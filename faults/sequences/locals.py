"""One rank of local steps, real or virtual."""

from types import MappingProxyType
from typing import Any

import numpy as np
import torch

import gradwire
from faults.sequences.answer import Vector, digest_of, flat
from faults.sequences.net import Net, images, loss_of
from faults.sequences.trainer import LR, Trainer, fp32_default


class LocalTrainer(Trainer):
    """One rank that trains alone, and exchanges weights every few steps."""

    together = MappingProxyType({"exchanges": True})

    def _build(self) -> None:
        self.net = self._new_net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=LR, momentum=0.9)
        self.wire = self._attach(self.net, self.optimizer, dict(self.setup.local))

    def _attach(self, net: Net, optimizer: Any, local: dict[str, Any], **more: Any) -> Any:
        fields = {**self.fields, **more}
        return gradwire.local_steps(net, optimizer, group=self.place.group, **local, **fields)

    def _is_broken(self) -> bool:
        return bool(self.wire.group.is_broken)

    def _shared(self) -> Vector | None:
        return flat(list(self.wire.shared_weights().values()))

    def _start(self) -> Vector:
        """Return the weights with which this round began, seen from outside."""
        start = self._shared()
        assert start is not None
        if self.setup.local["keep_unsent"]:
            start = start - flat([self.wire.residual(n) for n, _ in self.net.named_parameters()])
        return torch.from_numpy(start).to(self.dtype).to(torch.float32).numpy()

    def do_step(self, data: int, poisoned: bool = False, exchanges: bool = False) -> None:
        """Take an inner step, and exchange if it is time, or with `exchanges` in any case."""
        self.optimizer.zero_grad()
        loss_of(self.net(images(data, self.place.rank, self.dtype))).backward()
        self.optimizer.step()
        if poisoned:
            with torch.no_grad():
                self.net.second.weight[0, 0, 0, 0] = float("inf")
        steps, start, ended = self.wire.steps, self._start(), flat(self.weights)
        self.now.more["own"] = ended, digest_of(self.optimizer)
        self.wire.step()
        if exchanges and self.wire.steps == steps:
            self.wire.exchange()
        if self.wire.steps > steps:
            moved = start - ended
            self.now.came = np.where(np.isfinite(moved), moved, np.float32(0))
            self.now.taken = bool(np.isfinite(ended).all())

    def do_skip_step(self) -> None:
        self.wire.skip_step()

    def do_load(
        self, folder: str, parameters: Vector | None = None, optimizer: bytes = b""
    ) -> None:
        # Weights and optimiser are in the checkpoint.
        gradwire.load(self.wire, folder)

    def do_attach(self, differ: str, mine: bool) -> None:
        """Make local steps of a second model, with a setting that differs on one rank."""
        with fp32_default():
            net = self._new_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=LR)
        local, more = dict(self.setup.local), {}
        if mine and differ == "density":
            more["density"] = self.fields["density"] / 2
        elif mine:
            local["every"] += 1
        self._attach(net, optimizer, local, **more).close()
