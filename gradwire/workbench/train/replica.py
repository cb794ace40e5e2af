"""The copy of the model on one rank, with its optimiser and its wire or local steps."""

import gc
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.hashing import blake2b_seed
from gradwire.integrate.adam import warn_of_adam
from gradwire.integrate.local_steps import LocalSteps
from gradwire.state.state import State
from gradwire.workbench import models
from gradwire.workbench.train import checkpoint
from gradwire.workbench.train.options import Options
from gradwire.workbench.train.worker import Worker


class Replica:
    """The model under DDP with gradwire attached, or in local steps (collective).

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
        self.optimizer = options.optimizer_for(model)
        self.module = model
        """The plain model."""
        self.trained: nn.Module = model
        """The model that training calls: DDP, or the plain one in a run with rounds."""
        self.wire: State
        if options.has_rounds:
            self.wire = gradwire.local_steps(model, self.optimizer, **options.rounds())
        else:
            ids = [worker.device.index] if worker.device.type == "cuda" else None
            self.trained = DistributedDataParallel(model, device_ids=ids)
            self.wire = gradwire.attach(self.trained, options.config(epoch_steps))
            if worker.first:
                warn_of_adam(self.wire, [self.optimizer])
        if saved is not None:
            with checkpoint.misfit_errors(folder):
                self.optimizer.load_state_dict(saved["optimizer"])
            checkpoint.load_wire(folder, saved, self.wire)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next steps."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.options.follow_lr:
            self.wire.follow_lr(lr)

    def step(self, batch: Sequence[Tensor]) -> Tensor:
        """Take one optimiser step, and return the loss of this rank."""
        self.optimizer.zero_grad()
        loss = self.options.task.loss(self.trained, batch)
        self._backward(loss)
        if self.options.clip:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.options.clip)
        self.optimizer.step()
        if isinstance(self.wire, LocalSteps):
            self.wire.step()
        return loss.detach()

    def end_round(self) -> None:
        """Exchange what the last steps did, if a round is open (collective)."""
        if isinstance(self.wire, LocalSteps) and self.wire.inner_steps % self.wire.every:
            self.wire.exchange()

    def shared(self) -> AbstractContextManager[None]:
        """Put the weights that all ranks share into the model while the block runs.

        Between two exchanges of weights the ranks differ; otherwise nothing changes.
        """
        return self.wire.shared() if isinstance(self.wire, LocalSteps) else nullcontext()

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
        del self.wire, self.optimizer, self.trained, self.module
        gc.collect()
