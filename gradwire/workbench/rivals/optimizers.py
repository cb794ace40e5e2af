"""Optimisers that the rivals take after their exchange: signs, Muon of an update, and AdamS."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.optim.newton_schulz import batches, orthogonalise
from gradwire.optim.roles import Roles
from gradwire.workbench.simulate.language_run import BETAS, DECAY, OPTIMIZERS


class _Plain(Optimizer):
    """An optimiser whose step needs the gradients as they are, and no closure."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            found = [p for p in group["params"] if p.grad is not None]
            for p in found:
                p.mul_(1 - group["lr"] * group["weight_decay"])
            self._move(found, group)
        return None

    def _move(self, parameters: list[Tensor], group: Mapping[str, Any]) -> None:
        raise NotImplementedError


class SignStep(_Plain):
    """DeMo's step as released: w = w - lr decay w - lr sign(update), for all parameters."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    def _move(self, parameters: list[Tensor], group: Mapping[str, Any]) -> None:
        for p in parameters:
            assert p.grad is not None
            p.sub_(torch.sign(p.grad), alpha=group["lr"])


class IdentityStep(SignStep):
    """DeMo without a rule after it: w = w - lr decay w - update; the update has lr inside."""

    def _move(self, parameters: list[Tensor], group: Mapping[str, Any]) -> None:
        for p in parameters:
            assert p.grad is not None
            p.sub_(p.grad)


class MuonStep(_Plain):
    """Muon without momentum for hidden matrices, 0.2 sign(update) for all other parameters.

    Both have updates of a root mean square of 0.2 lr, so one learning rate serves.
    """

    SIZE = 0.2

    def __init__(self, model: nn.Module, lr: float, weight_decay: float) -> None:
        groups = [
            {"params": parameters, "rule": role.rule} for role, parameters in Roles(model).groups()
        ]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    def _move(self, parameters: list[Tensor], group: Mapping[str, Any]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        if group["rule"] != "muon":
            for p, gradient in zip(parameters, gradients, strict=True):
                p.sub_(torch.sign(gradient), alpha=self.SIZE * group["lr"])
            return
        for places in batches(gradients):
            stacked = torch.stack([gradients[i] for i in places]).bfloat16()
            rate = self.SIZE * max(stacked.shape[1:]) ** 0.5 * group["lr"]
            for i, update in zip(places, orthogonalise(stacked), strict=True):
                parameters[i].add_(update, alpha=-rate)


class AdamS(_Plain):
    """AdamW with its own momentum in place of the second moment (Zhang et al., 2505.16363).

        v = beta2 m^2 + (1 - beta2) g^2 with the m before,   m = beta1 m + (1 - beta1) g
        w = w - lr decay w - lr m / (sqrt(v) + eps)

    An entry without a gradient goes on by beta1 / sqrt(beta2) lr a step, in its last direction,
    until m falls to eps. `holds`: it stays where it is instead, and so does its m.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = BETAS,
        eps: float = 1e-8,
        holds: bool = False,
    ) -> None:
        self.holds = holds
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def _move(self, parameters: list[Tensor], group: Mapping[str, Any]) -> None:
        first, second = group["betas"]
        for p in parameters:
            g = p.grad
            assert g is not None
            if not self.state[p]:
                self.state[p]["exp_avg"] = torch.zeros_like(p)
            m = self.state[p]["exp_avg"]
            root = (second * m.square() + (1 - second) * g.square()).sqrt()
            new = torch.lerp(m, g, 1 - first)
            step = new / (root + group["eps"])
            if self.holds:
                arrived = g != 0
                new, step = torch.where(arrived, new, m), torch.where(arrived, step, 0)
            m.copy_(new)
            p.sub_(step, alpha=group["lr"])


def _adams(model: nn.Module, lr: float, holds: bool) -> AdamS:
    """Return AdamS for all parameters, with weight decay on matrices."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.dim() < 2]},
    ]
    return AdamS(groups, lr, holds=holds)


RIVAL_OPTIMIZERS: Mapping[str, Callable[[nn.Module, float], Optimizer]] = {
    **OPTIMIZERS,
    "sign": lambda model, lr: SignStep(model.parameters(), lr, DECAY),
    "identity": lambda model, lr: IdentityStep(model.parameters(), lr, DECAY),
    "muon-step": lambda model, lr: MuonStep(model, lr, DECAY),
    "adams": lambda model, lr: _adams(model, lr, holds=False),
    "adams-holds": lambda model, lr: _adams(model, lr, holds=True),
}
"""Optimisers of the rivals by name, those of the study's own recipes included."""
