"""Train a language model with P virtual workers, by exchanging gradients or by local steps."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from gradwire.integrate.local_steps import LocalSteps, local_steps
from gradwire.integrate.virtual_cluster import VirtualCluster
from gradwire.optim import muon
from gradwire.ranks.virtual import VirtualRanks
from gradwire.workbench.data import Text

WARM_UP = 100
"""Steps in which the learning rate rises, and at most a quarter of the run."""
FLOOR = 0.1
"""The last learning rate, as a share of the largest."""
CLIP, DECAY, BETAS = 1.0, 0.1, (0.9, 0.95)
"""The largest norm of a gradient, the weight decay of matrices, and AdamW's betas."""
LOOK = 2048
"""Windows of the validation text that are scored during a run, evenly spaced."""


def adamw(model: nn.Module, lr: float) -> Optimizer:
    """Return AdamW for all parameters, with weight decay on matrices."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr, BETAS, fused=next(model.parameters()).is_cuda)


OPTIMIZERS: Mapping[str, Callable[[nn.Module, float], Optimizer]] = {
    "adamw": adamw,
    "muon": lambda model, lr: muon(model, lr=lr, weight_decay=DECAY),
}


@dataclass(frozen=True)
class LanguageRecipe:
    """A way to train: an optimiser, and the arguments of one of gradwire's two paths.

    gradients: fields of Config, to average gradients at every step.
    rounds: arguments of `local_steps`, to exchange weights every few steps. One of both is given.
    part: what trains in place of these two paths; it takes `gradients` or `rounds` as its own.
    """

    summary: str
    optimizer: str
    gradients: Mapping[str, Any] = field(default_factory=dict)
    rounds: Mapping[str, Any] = field(default_factory=dict)
    part: "Callable[[LanguageRun, Callable[[], nn.Module]], TrainingPart] | None" = None


class TrainingPart(Protocol):
    """The half of a run that trains: the weights of all workers, and how they are exchanged."""

    @property
    def bytes_sent(self) -> int: ...
    def step(self, batches: Sequence[tuple[Tensor, Tensor]], lr: float) -> Tensor: ...
    def put_weights(self, model: nn.Module) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, saved: dict[str, Any]) -> None: ...


class LanguageRun:
    """A training run of `workers` virtual workers on one device.

    All recipes of a seed see the same tokens in the same order: windows of the text are drawn
    without repetition, and `batch` windows per step go to each worker.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        recipe: LanguageRecipe,
        text: Text,
        *,
        workers: int,
        batch: int,
        steps: int,
        lr: float,
        seed: int,
        device: torch.device,
    ) -> None:
        self.recipe, self.text, self.device = recipe, text.to(device), device
        self.workers, self.batch, self.total, self.lr = workers, batch, steps, lr
        self.steps, self.seconds = 0, 0.0
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(text.examples, generator=generator, dtype=torch.int64)
        self.order = order[: steps * workers * batch]
        if len(self.order) < steps * workers * batch:
            raise ValueError(
                f"{text.name} has {text.examples:,} windows, the run takes "
                f"{steps * workers * batch:,}: fewer steps or tokens"
            )
        torch.manual_seed(seed)
        self.model = build().to(device)
        """The network that is scored."""
        self.entries = sum(p.numel() for p in self.model.parameters())
        self._loss = _make_loss(device)
        make = recipe.part or (_Rounds if recipe.rounds else _Gradients)
        self.part: TrainingPart = make(self, build)

    @property
    def bytes_sent(self) -> int:
        """Bytes that all workers together have sent so far."""
        return self.part.bytes_sent

    @property
    def dense_bytes(self) -> int:
        """Bytes that a ring all-reduce of fp32 gradients at every step would have sent so far."""
        return 2 * (self.workers - 1) * 4 * self.entries * self.steps

    def step(self) -> Tensor:
        """Do one step of all workers; return their mean loss, which stays on the device."""
        begin = time.perf_counter()
        first = self.steps * self.workers * self.batch
        windows = self.order[first : first + self.workers * self.batch].view(self.workers, -1)
        batches = [self.text.windows(self.text.train, row) for row in windows]
        loss = self.part.step(batches, self.lr * rate_factor(self.steps, self.total))
        self.steps += 1
        self.seconds += time.perf_counter() - begin
        return loss

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean loss of a batch, in nats per token."""
        result: Tensor = self._loss(model, *batch)
        return result

    @torch.no_grad()
    def score(self, stream: Tensor, windows: int = 0) -> float:
        """Return the loss on a text, in nats per token, of the weights that all workers share.

        windows: score that many, evenly spaced; 0 for all.
        """
        self.part.put_weights(self.model)
        count = (len(stream) - 1) // self.text.window
        every = max(1, count // windows) if windows else 1
        chosen = torch.arange(0, count, every, dtype=torch.int64)
        chosen = chosen[: windows or count]
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        # Equal batches, so that nothing is compiled again for the last.
        at_once = min(self.batch, len(chosen))
        for indices in chosen[: len(chosen) // at_once * at_once].split(at_once):
            loss = self.loss(self.model, self.text.windows(stream, indices))
            sums += torch.stack([loss.double(), torch.ones_like(loss, dtype=torch.float64)])
        return float(sums[0] / sums[1])

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on."""
        return {"steps": self.steps, "seconds": self.seconds, "part": self.part.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore a `state_dict`; the steps that follow repeat bit for bit."""
        self.steps, self.seconds = saved["steps"], saved["seconds"]
        self.part.load_state_dict(saved["part"])


class _Gradients:
    """Gradients of all workers are averaged at every step, as `attach` does."""

    def __init__(self, run: LanguageRun, build: Callable[[], nn.Module]) -> None:
        self.run = run
        self.model = run.model
        self.parameters = list(self.model.parameters())
        self.optimizer = OPTIMIZERS[run.recipe.optimizer](self.model, run.lr)
        self.cluster = VirtualCluster(run.workers, **run.recipe.gradients)

    @property
    def bytes_sent(self) -> int:
        if not self.run.steps:
            return 0
        return sum(self.cluster.stats(rank).bytes_sent for rank in range(self.run.workers))

    def step(self, batches: Sequence[tuple[Tensor, Tensor]], lr: float) -> Tensor:
        set_lr(self.optimizer, lr)
        flat, losses = [], []
        for batch in batches:
            loss = self.run.loss(self.model, batch)
            gradients = torch.autograd.grad(loss, self.parameters)
            flat.append(torch.cat([g.reshape(-1) for g in gradients]))
            losses.append(loss.detach())
        update = self.cluster.average(flat).split([p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, update, strict=True):
            parameter.grad = part.view_as(parameter)
        nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        return torch.stack(losses).mean()

    def put_weights(self, model: nn.Module) -> None:
        assert model is self.model

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "cluster": self.cluster.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.cluster.load_state_dict(saved["cluster"])


class _Rounds:
    """Each worker trains its own weights, and `local_steps` exchanges them."""

    def __init__(self, run: LanguageRun, build: Callable[[], nn.Module]) -> None:
        self.run = run
        models = [build().to(run.device) for _ in range(run.workers)]
        models[0].load_state_dict(run.model.state_dict())
        optimizers = [OPTIMIZERS[run.recipe.optimizer](model, run.lr) for model in models]
        self.workers = list(zip(models, optimizers, strict=True))
        self.ranks = VirtualRanks(run.workers)
        self.locals: list[LocalSteps] = self.ranks.run(
            lambda rank: local_steps(
                *self.workers[rank], group=self.ranks.groups[rank], **run.recipe.rounds
            )
        )

    @property
    def bytes_sent(self) -> int:
        return sum(group.bytes_sent for group in self.ranks.groups)

    def step(self, batches: Sequence[tuple[Tensor, Tensor]], lr: float) -> Tensor:
        losses = []
        for (model, optimizer), batch in zip(self.workers, batches, strict=True):
            set_lr(optimizer, lr)
            optimizer.zero_grad()
            loss = self.run.loss(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            losses.append(loss.detach())
        self.ranks.run(lambda rank: self.locals[rank].step())
        return torch.stack(losses).mean()

    def put_weights(self, model: nn.Module) -> None:
        weights = self.locals[0].shared_weights()
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])

    def state_dict(self) -> dict[str, Any]:
        return {"workers": [local.state_dict() for local in self.locals]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for local, part in zip(self.locals, saved["workers"], strict=True):
            local.load_state_dict(part)


def rate_factor(step: int, total: int) -> float:
    """Return the factor on the learning rate: a warm-up, then a cosine down to `FLOOR`."""
    warm = min(WARM_UP, max(1, total // 4))
    done = min(1.0, max(0, step - warm) / max(1, total - warm))
    cosine = (1 + FLOOR) / 2 + (1 - FLOOR) / 2 * math.cos(math.pi * done)
    return min((step + 1) / warm, cosine)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Give all parameter groups one learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def _make_loss(device: torch.device) -> Callable[..., Tensor]:
    """Return the loss of a model and a batch; on CUDA it is compiled, with products in bf16."""

    def loss(model: nn.Module, tokens: Tensor, following: Tensor) -> Tensor:
        on = device.type == "cuda"
        with torch.autocast(device.type, torch.bfloat16, enabled=on, cache_enabled=False):
            scores = model(tokens)
        return F.cross_entropy(scores.float().flatten(0, 1), following.flatten())

    return torch.compile(loss, dynamic=False) if device.type == "cuda" else loss
