"""The copy of the model on one rank, with its optimiser and its wire."""

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.hashing import blake2b_seed
from gradwire.integrate.adam import warn_of_adam
from gradwire.workbench import models
from gradwire.workbench.train import checkpoint
from gradwire.workbench.train.options import Options
from gradwire.workbench.train.worker import Worker


class Replica:
    """The model under DDP, its optimiser, and gradwire attached (collective).

    network: keywords of the model's function. saved: the content of the checkpoint in `folder`.
    Without a checkpoint the weights come from the seed. epoch_steps: the steps of an epoch.
    """

    def __init__(
        self,
        options: Options,
        network: Mapping[str, Any],
        worker: Worker,
        folder: Path,
        saved: dict[str, Any] | None,
        epoch_steps: int,
    ) -> None:
        self.options = options
        torch.manual_seed(blake2b_seed(options.seed))
        model = models.build(options.model, **network).to(worker.device)
        if saved is not None:
            with checkpoint.misfit_errors(folder):
                model.load_state_dict(saved["model"])
        ids = [worker.device.index] if worker.device.type == "cuda" else None
        self.ddp = DistributedDataParallel(model, device_ids=ids)
        self.optimizer = options.make_optimizer(self.ddp.parameters())
        self.wire = gradwire.attach(self.ddp, options.config(epoch_steps))
        if worker.rank == 0:
            warn_of_adam(self.wire, [self.optimizer])
        if saved is not None:
            with checkpoint.misfit_errors(folder):
                self.optimizer.load_state_dict(saved["optimizer"])
            checkpoint.load_wire(folder, saved, self.wire)

    @property
    def module(self) -> nn.Module:
        """The plain model."""
        return self.ddp.module

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next steps."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.options.follow_lr:
            self.wire.follow_lr(lr)

    def step(self, batch: Sequence[Tensor]) -> Tensor:
        """Take one optimiser step, and return the loss of this rank."""
        self.optimizer.zero_grad()
        loss = self.options.task.loss(self.ddp, batch)
        self._backward(loss)
        if self.options.clip:
            nn.utils.clip_grad_norm_(self.ddp.parameters(), self.options.clip)
        self.optimizer.step()
        return loss.detach()

    def _backward(self, loss: Tensor) -> None:
        try:
            loss.backward()
        except RuntimeError:
            # Autograd keeps the text of an error in a hook, but loses its type.
            engine = self.wire.engine
            if engine is not None and engine.broken is not None:
                raise engine.broken from None
            raise

    def close(self) -> None:
        """Detach the wire and delete DDP, in the order that the end of a process group needs."""
        self.wire.close()
        del self.wire, self.optimizer, self.ddp
        gc.collect()
