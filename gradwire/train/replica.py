"""This rank's copy of the model, with its optimiser and its wire."""

import gc
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import models
from gradwire.data import mix
from gradwire.train import checkpoint
from gradwire.train.options import Options
from gradwire.train.place import Place


class Replica:
    """The model under DDP, SGD, and gradwire attached (collective).

    `saved` is a checkpoint's content, from `folder`; without it the weights come from the seed.
    """

    def __init__(
        self, options: Options, place: Place, folder: Path, saved: dict[str, Any] | None
    ) -> None:
        torch.manual_seed(mix(options.seed))
        model = models.build(options.model).to(place.device)
        if saved is not None:
            model.load_state_dict(saved["model"])
        ids = [place.device.index] if place.device.type == "cuda" else None
        self.ddp = DistributedDataParallel(model, device_ids=ids)
        self.optimizer = torch.optim.SGD(
            self.ddp.parameters(),
            lr=options.lr,
            weight_decay=options.weight_decay,
            **options.sgd_momentum,
        )
        self.wire = gradwire.attach(self.ddp, options.config())
        if saved is not None:
            self.optimizer.load_state_dict(saved["optimizer"])
            checkpoint.load_wire(folder, saved, self.wire)

    @property
    def module(self) -> nn.Module:
        """The plain model."""
        return self.ddp.module

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of the next steps."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """One optimiser step; returns this rank's loss."""
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.ddp(images), labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def close(self) -> None:
        """Lets go of everything, in the order that a process group's end needs."""
        self.wire.close()
        del self.wire, self.optimizer, self.ddp
        gc.collect()
