"""A crew whose workers each have weights of their own, and exchange them now and then."""

from typing import Any

import torch
from torch import Tensor, nn

from gradwire.integrate.local_steps import LocalSteps, local_steps
from gradwire.ranks.virtual import VirtualRanks
from gradwire.workbench import models
from gradwire.workbench.data import Data
from gradwire.workbench.simulate.crew import Crew
from gradwire.workbench.simulate.graphs import Passes
from gradwire.workbench.train.options import Options


class Weights(nn.Module):
    """All weights of a network as one flat parameter, which the network's are views of."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        parts = list(network.parameters())
        self.flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in parts]))
        pieces = self.flat.detach().split([p.numel() for p in parts])
        for parameter, piece in zip(parts, pieces, strict=True):
            parameter.data = piece.view_as(parameter)


class LocalCrew(Crew):
    """`options.workers` workers in this process that call `gradwire.local_steps`.

    The order of examples and the first weights are a Crew's; `local` are local_steps' arguments.
    With `flush` the last of `total` steps sends everything.
    """

    def __init__(
        self, options: Options, data: Data, total: int, *, flush: bool = False, **local: Any
    ) -> None:
        super().__init__(options, data)
        self._flush_at = total if flush else 0
        network = {**options.size, **data.network}
        more = [models.build(options.model, **network) for _ in self.shards]
        self.judged, *others = (m.to(self.device) for m in more)
        self.models = [self.model, *others]
        self.weights = [Weights(model) for model in self.models]
        self.optimizers = [options.make_optimizer(w.parameters()) for w in self.weights]
        self.ranks = VirtualRanks(options.workers)
        self.locals: list[LocalSteps] = self.ranks.run(lambda rank: self._open(rank, local))

    def _open(self, rank: int, local: dict[str, Any]) -> LocalSteps:
        group = self.ranks.groups[rank]
        return local_steps(self.weights[rank], self.optimizers[rank], group=group, **local)

    @property
    def bytes_sent(self) -> int:
        """What all workers have sent so far."""
        return sum(group.bytes_sent for group in self.ranks.groups)

    def step(self, lr: float | None = None, watch: tuple[int, ...] = ()) -> Tensor:
        """An inner step of all workers, and the exchange where it is due; their mean loss."""
        epoch, offset = divmod(self.steps, self.epoch_steps)
        batch = self.batches(epoch, offset)
        if self.passes is None:
            self.passes = Passes(self.models, self.options.task.loss, batch)
        self.passes(batch)
        self._inner(self.passes.gradients, self.options.lr_at(epoch) if lr is None else lr)
        self.steps += 1
        if self.steps % self.locals[0].every:
            for worker in self.locals:
                worker.step()
        else:
            self.ranks.run(self._exchange)
        return self.passes.losses.mean()

    def score(self) -> float:
        """The score of the weights that all workers share."""
        weights = self.locals[0].shared_weights()["flat"]
        nn.utils.vector_to_parameters(weights, self.judged.parameters())
        return super().score()

    def _inner(self, gradients: Tensor, lr: float) -> None:
        if self.options.clip:
            norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
            gradients *= (self.options.clip / (norms + 1e-6)).clamp(max=1)
        for worker, gradient in zip(self.optimizers, gradients, strict=True):
            (group,) = worker.param_groups
            group["lr"] = lr
            group["params"][0].grad = gradient
            worker.step()

    def _exchange(self, rank: int) -> None:
        if self.steps == self._flush_at:
            self.locals[rank].flush()
        self.locals[rank].step()
