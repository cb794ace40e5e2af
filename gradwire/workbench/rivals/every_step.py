"""EveryStep: a rival that exchanges at every step, and one optimiser after it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.workbench.rivals.demo import DemoExchange
from gradwire.workbench.rivals.exchange import RivalExchange, as_flat
from gradwire.workbench.rivals.optimizers import RIVAL_OPTIMIZERS
from gradwire.workbench.rivals.powersgd import PowerSgdExchange
from gradwire.workbench.rivals.shared_masks import SharedMaskExchange
from gradwire.workbench.simulate.language_run import CLIP, LanguageRun, set_lr

EXCHANGES: dict[str, type[RivalExchange]] = {
    "demo": DemoExchange,
    "powersgd": PowerSgdExchange,
    "shared-masks": SharedMaskExchange,
}


class EveryStep:
    """Gradients of all workers go through a rival's exchange, whose update one optimiser takes.

    The recipe's `gradients` name the exchange, with its options beside it. With "clip" the mean is
    clipped, as for dense gradients, in place of every worker's own gradient.
    """

    def __init__(self, run: LanguageRun, build: Callable[[], nn.Module]) -> None:
        self.run, self.model = run, run.model
        self.parameters = list(self.model.parameters())
        self.optimizer = RIVAL_OPTIMIZERS[run.recipe.optimizer](self.model, run.lr)
        options: dict[str, Any] = dict(run.recipe.gradients)
        make = EXCHANGES[options.pop("exchange")]
        options["dtype"] = self.parameters[0].dtype
        self.clips_mean = options.pop("clip", "") == "mean"
        shapes = [tuple(p.shape) for p in self.parameters]
        self.exchange = make(run.workers, shapes, run.device, **options)

    @property
    def bytes_sent(self) -> int:
        return self.exchange.bytes_sent

    @property
    def forgotten(self) -> float:
        """Energy in neither the update nor a residual, over the energy of all that was offered."""
        return self.exchange.forgotten

    def step(self, batches: Sequence[tuple[Tensor, Tensor]], lr: float) -> Tensor:
        set_lr(self.optimizer, lr)
        flat, losses = [], []
        for batch in batches:
            loss = self.run.loss(self.model, batch)
            gradients = as_flat(torch.autograd.grad(loss, self.parameters))
            if not self.clips_mean:
                gradients = gradients * (CLIP / (gradients.norm() + 1e-6)).clamp(max=1)
            flat.append(gradients)
            losses.append(loss.detach())
        with torch.no_grad():
            update = self.exchange.average(torch.stack(flat), lr)
        parts = update.split(self.exchange.sizes)
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        if self.clips_mean:
            nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        return torch.stack(losses).mean()

    def put_weights(self, model: nn.Module) -> None:
        assert model is self.model

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "exchange": self.exchange.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.exchange.load_state_dict(saved["exchange"])
