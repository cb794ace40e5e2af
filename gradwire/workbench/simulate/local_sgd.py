"""Simulate local SGD fast: the weights of all virtual workers are rows of one matrix."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.types import align
from gradwire.workbench.data import Data
from gradwire.workbench.simulate.graph_passes import GraphPasses
from gradwire.workbench.simulate.simulation import Simulation
from gradwire.workbench.train.options import Options


class LocalSgdSimulation(Simulation):
    """`gradwire.local_steps` with outer="average" and SGD inside, for many small workers.

    x: the weights that all workers agree on. w: a matrix whose row p holds worker p's weights.

        every step:           m = momentum m + gradient + weight decay w,   w = w - lr m
        every `every` steps:  u = (w at the last exchange) - w + residual,  x = x - update
                              w = x, with `keep_unsent` w = x - residual

    With `keep_unsent` a worker keeps the part of its change that was not sent: w = x - residual.
    Scores are those of x, with batch norm's statistics averaged over the workers.
    """

    def __init__(
        self, options: Options, data: Data, every: int, *, keep_unsent: bool = False
    ) -> None:
        super().__init__(options, data)
        self.every, self.keep_unsent = every, keep_unsent
        self.scored_model = deepcopy(self.model)
        others = [deepcopy(self.model) for _ in self.shards[1:]]
        self.models = [self.model, *others]
        rows = len(self.models) + 1
        # Convolutions are slower if weights begin at an unaligned address.
        storage = torch.zeros(rows, align(self.entries), dtype=torch.float32, device=self.device)
        for row, model in zip(storage, [*self.models, self.scored_model], strict=True):
            _move_into(row, model)
        self.weights, self.x = storage[:-1, : self.entries], storage[-1, : self.entries]
        self._start = self.weights.clone()
        self._momentum = torch.zeros_like(self.weights)
        self._flush = False

    @torch.no_grad()
    def step(self, lr: float | None = None, watch: tuple[int, ...] = ()) -> Tensor:
        """Do one inner step of all workers, and the exchange if due; return their mean loss."""
        assert not watch, "residuals are of weights here"
        epoch, offset = divmod(self.steps, self.epoch_steps)
        batch = self.batches(epoch, offset)
        if self.passes is None:
            with torch.enable_grad():
                self.passes = GraphPasses(self.models, self.options.task.loss, batch)
        with self.computing, torch.enable_grad():
            self.passes(batch)
        gradients = self.passes.gradients.add_(self.weights, alpha=self.options.weight_decay)
        self._momentum.mul_(self.options.momentum).add_(gradients)
        self.weights.add_(self._momentum, alpha=-(self.options.lr_at(epoch) if lr is None else lr))
        self.steps += 1
        if self._flush or self.steps % self.every == 0:
            self._exchange()
        return self.passes.losses.mean()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a `Simulation`, and the weights and buffers of every worker."""
        buffers = [[buffer.clone() for buffer in model.buffers()] for model in self.models]
        tensors = [tensor.clone() for tensor in self._matrices()]
        return super().state_dict() | {"own": tensors, "buffers": buffers}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict(saved)
        for matrix, value in zip(self._matrices(), saved["own"], strict=True):
            matrix.copy_(value)
        for model, values in zip(self.models, saved["buffers"], strict=True):
            for buffer, value in zip(model.buffers(), values, strict=True):
                buffer.copy_(value)

    def _matrices(self) -> list[Tensor]:
        return [self.weights, self.x, self._start, self._momentum]

    def flush(self) -> None:
        """Make the next step end with an exchange that sends everything."""
        self._flush = True
        super().flush()

    def score(self) -> float:
        """Return the test score of x, with the mean of the workers' buffers."""
        networks = (self.scored_model, *self.models)
        for mean, *workers in zip(*(network.buffers() for network in networks), strict=True):
            mean.copy_(torch.stack(workers).double().mean(0))
        return super().score()

    def _exchange(self) -> None:
        update = self.cluster.average(list(self._start - self.weights))
        self.x.sub_(update)
        self.weights.copy_(self.x)
        if self.keep_unsent:
            for rank, row in enumerate(self.weights):
                row.sub_(self.cluster.residual(rank))
        self._start.copy_(self.weights)
        self._flush = False
        self.exchanges += 1


def _move_into(row: Tensor, model: nn.Module) -> None:
    """Copy the model's weights into `row`, and make the parameters views of it."""
    offset = 0
    for parameter in model.parameters():
        view = row[offset : offset + parameter.numel()].view_as(parameter)
        view.copy_(parameter.detach())
        parameter.data = view
        offset += parameter.numel()
