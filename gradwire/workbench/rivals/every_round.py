"""EveryRound: rivals that train apart and exchange every few steps, whole or fragment by fragment.

One fragment and no delay is DiLoCo's way; several in turn, taken over later, Streaming DiLoCo's.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.errors import ConfigError
from gradwire.workbench.rivals.coded_exchange import CodedExchange
from gradwire.workbench.rivals.exchange import as_flat
from gradwire.workbench.rivals.fragments import cut_into_fragments
from gradwire.workbench.rivals.optimizers import RIVAL_OPTIMIZERS
from gradwire.workbench.simulate.language_run import CLIP, LanguageRun, set_lr

MULOCO_OUTER = {1: (0.7, 0.6), 8: (0.9, 0.8), 16: (1.0, 0.9)}
"""MuLoCo's outer learning rate and momentum, by the number of workers."""


class Fragment:
    """Parameters that are exchanged together, with their shared weights x and outer momentum m.

    update = mean over workers of x - w, as it arrives
    m = momentum m + update,   x = x - lr (update + momentum m)
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        names: Sequence[str],
        offset: int,
        options: Mapping[str, Any],
    ) -> None:
        self.names, self.offset = list(names), offset
        """offset: the step of the first exchange."""
        self.weights = [[model.get_parameter(name) for name in names] for model in models]
        shapes = [tuple(p.shape) for p in self.weights[0]]
        self.shared = as_flat([p.detach() for p in self.weights[0]]).clone()
        self.velocity = torch.zeros_like(self.shared)
        self.update = torch.zeros_like(self.shared)
        """What was exchanged last; it is taken over after the delay."""
        self.exchange = CodedExchange(
            len(models), shapes, self.shared.device, dtype=self.shared.dtype, **options
        )

    @torch.no_grad()
    def send(self) -> None:
        """Exchange the differences of the present weights."""
        own = torch.stack([as_flat(parts) for parts in self.weights])
        self.update.copy_(self.exchange.average(self.shared - own, 1.0))

    @torch.no_grad()
    def take_over(self, outer: tuple[float, float], mixing: float) -> None:
        """Take the outer step, and mix x into the workers' weights.

        mixing: the share of a worker's own weights.
        """
        lr, momentum = outer
        self.velocity.mul_(momentum).add_(self.update)
        self.shared.sub_(self.update + momentum * self.velocity, alpha=lr)
        parts = self.shared.split(self.exchange.sizes)
        for own in self.weights:
            for weight, part in zip(own, parts, strict=True):
                x = part.view_as(weight)
                weight.copy_(torch.lerp(x, weight, mixing) if mixing else x)

    def tensors(self) -> dict[str, Tensor]:
        return {"shared": self.shared, "velocity": self.velocity, "update": self.update}


class EveryRound:
    """Each worker trains its own weights; the recipe's `rounds` say how they are exchanged.

    every: steps of a round. code and the options of CodedExchange. outer: the outer learning rate
    and momentum, or "muloco" for those of the number of workers. fragments: parts of the model,
    each exchanged once a round, at its own step. delay: steps between sending an update and taking
    it over. mixing: the share of a worker's own weights that it keeps then.
    """

    def __init__(self, run: LanguageRun, build: Callable[[], nn.Module]) -> None:
        options: dict[str, Any] = dict(run.recipe.rounds)
        self.run, self.every = run, options.pop("every")
        outer = options.pop("outer")
        self.outer = muloco_outer(run.workers) if outer == "muloco" else outer
        self.delay, self.mixing = options.pop("delay", 0), options.pop("mixing", 0.0)
        if not 0 <= self.delay < self.every:
            raise ConfigError(
                f"a delay of {self.delay} steps needs rounds of more, got --every {self.every}"
            )
        count = options.pop("fragments", 1)
        self.steps = 0
        self.models = [copy.deepcopy(run.model) for _ in range(run.workers)]
        make = RIVAL_OPTIMIZERS[run.recipe.optimizer]
        self.optimizers = [make(model, run.lr) for model in self.models]
        names = cut_into_fragments([name for name, _ in run.model.named_parameters()], count)
        self.fragments = [
            Fragment(self.models, part, place * self.every // count, options)
            for place, part in enumerate(names, start=1)
        ]

    @property
    def bytes_sent(self) -> int:
        return sum(fragment.exchange.bytes_sent for fragment in self.fragments)

    @property
    def forgotten(self) -> float:
        """Energy in neither the update nor a residual, over the energy of all that was offered."""
        energy = torch.stack([fragment.exchange.energy for fragment in self.fragments]).sum(0)
        lost, offered = energy.tolist()
        return lost / offered if offered else 0.0

    def step(self, batches: Sequence[tuple[Tensor, Tensor]], lr: float) -> Tensor:
        losses = []
        for model, optimizer, batch in zip(self.models, self.optimizers, batches, strict=True):
            set_lr(optimizer, lr)
            optimizer.zero_grad()
            loss = self.run.loss(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            losses.append(loss.detach())
        self.steps += 1
        for fragment in self.fragments:
            self._exchange_if_due(fragment)
        return torch.stack(losses).mean()

    def _exchange_if_due(self, fragment: Fragment) -> None:
        if self._is_due(fragment, self.steps):
            fragment.send()
        if self._is_due(fragment, self.steps - self.delay):
            fragment.take_over(self.outer, self.mixing)

    def _is_due(self, fragment: Fragment, step: int) -> bool:
        return step >= fragment.offset and (step - fragment.offset) % self.every == 0

    @torch.no_grad()
    def put_weights(self, model: nn.Module) -> None:
        for fragment in self.fragments:
            parts = fragment.shared.split(fragment.exchange.sizes)
            for name, part in zip(fragment.names, parts, strict=True):
                weight = model.get_parameter(name)
                weight.copy_(part.view_as(weight))

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "models": [model.state_dict() for model in self.models],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "fragments": [
                {name: tensor.clone() for name, tensor in fragment.tensors().items()}
                for fragment in self.fragments
            ],
            "exchanges": [fragment.exchange.state_dict() for fragment in self.fragments],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.steps = saved["steps"]
        for model, state in zip(self.models, saved["models"], strict=True):
            model.load_state_dict(state)
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        for fragment, state in zip(self.fragments, saved["fragments"], strict=True):
            for name, tensor in fragment.tensors().items():
                tensor.copy_(state[name])
        for fragment, state in zip(self.fragments, saved["exchanges"], strict=True):
            fragment.exchange.load_state_dict(state)


def muloco_outer(workers: int) -> tuple[float, float]:
    """Return MuLoCo's outer step for the nearest number of workers that its paper names."""
    nearest = min(MULOCO_OUTER, key=lambda known: max(known / workers, workers / known))
    return MULOCO_OUTER[nearest]
