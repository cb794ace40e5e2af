"""A crew whose workers each have weights of their own, all of them rows of one matrix."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.types import align
from gradwire.workbench.data import Data
from gradwire.workbench.simulate.crew import Crew
from gradwire.workbench.simulate.graphs import Passes
from gradwire.workbench.train.options import Options


class LocalGraph(Crew):
    """`gradwire.local_steps` with outer="average" and SGD inside, for many small workers.

    x: the weights that all workers agree on. Row p of w: worker p's own.

        every step:           m = momentum m + gradient + weight decay w,   w = w - lr m
        every `every` steps:  u = (w at the last exchange) - w + residual,  x = x - update
                              w = x, with `keep_unsent` w = x - residual

    With `keep_unsent` a worker goes on from what it has found itself, whether or not it was sent:
    x - w is the residual. Scores are those of x, with batch norm's statistics averaged over the
    workers.
    """

    def __init__(
        self, options: Options, data: Data, every: int, *, keep_unsent: bool = False
    ) -> None:
        super().__init__(options, data)
        self.every, self.keep_unsent = every, keep_unsent
        self.judged = deepcopy(self.model)
        others = [deepcopy(self.model) for _ in self.shards[1:]]
        self.models = [self.model, *others]
        rows = len(self.models) + 1
        # Aligned rows: convolutions are slower where weights begin anywhere.
        storage = torch.zeros(rows, align(self.entries), dtype=torch.float32, device=self.device)
        for row, model in zip(storage, [*self.models, self.judged], strict=True):
            _move_into(row, model)
        self.weights, self.x = storage[:-1, : self.entries], storage[-1, : self.entries]
        self._start = self.weights.clone()
        self._momentum = torch.zeros_like(self.weights)
        self._flush = False

    @torch.no_grad()
    def step(self, lr: float | None = None, watch: tuple[int, ...] = ()) -> Tensor:
        """An inner step of all workers, and the exchange where it is due; their mean loss."""
        assert not watch, "residuals are of weights here"
        epoch, offset = divmod(self.steps, self.epoch_steps)
        batch = self.batches(epoch, offset)
        if self.passes is None:
            with torch.enable_grad():
                self.passes = Passes(self.models, self.options.task.loss, batch)
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
        """That of a crew, and every worker's own."""
        buffers = [[buffer.clone() for buffer in model.buffers()] for model in self.models]
        tensors = [tensor.clone() for tensor in self._own()]
        return super().state_dict() | {"own": tensors, "buffers": buffers}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict(saved)
        for mine, given in zip(self._own(), saved["own"], strict=True):
            mine.copy_(given)
        for model, given in zip(self.models, saved["buffers"], strict=True):
            for buffer, value in zip(model.buffers(), given, strict=True):
                buffer.copy_(value)

    def _own(self) -> list[Tensor]:
        return [self.weights, self.x, self._start, self._momentum]

    def flush(self) -> None:
        """The next step ends with an exchange that sends everything."""
        self._flush = True
        super().flush()

    def score(self) -> float:
        """That of x, with the mean of the workers' buffers."""
        for mine, *theirs in zip(*(m.buffers() for m in (self.judged, *self.models)), strict=True):
            mine.copy_(torch.stack(theirs).double().mean(0))
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
    """The model's weights become views of `row`."""
    offset = 0
    for parameter in model.parameters():
        place = row[offset : offset + parameter.numel()].view_as(parameter)
        place.copy_(parameter.detach())
        parameter.data = place
        offset += parameter.numel()
