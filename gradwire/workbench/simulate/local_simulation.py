"""Simulate `gradwire.local_steps`: each virtual worker has its own weights.

The workers exchange their weights every few steps.
"""

from typing import Any

import torch
from torch import Tensor, nn

from gradwire.integrate.local_steps import LocalSteps, local_steps
from gradwire.ranks.virtual import VirtualRanks
from gradwire.workbench import models
from gradwire.workbench.data import Data
from gradwire.workbench.simulate.graph_passes import GraphPasses
from gradwire.workbench.simulate.simulation import Simulation
from gradwire.workbench.train.options import Options


class _FlatWeights(nn.Module):
    """One flat parameter that holds all weights of a network.

    The parameters of the network become views of it.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        parts = list(network.parameters())
        self.flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in parts]))
        pieces = self.flat.detach().split([p.numel() for p in parts])
        for parameter, piece in zip(parts, pieces, strict=True):
            parameter.data = piece.view_as(parameter)


class LocalSimulation(Simulation):
    """`options.workers` virtual workers that call `gradwire.local_steps` with arguments `local`.

    The first weights and the order of examples are those of a `Simulation`. With `flush`, the last
    of `total` steps sends everything.
    """

    def __init__(
        self, options: Options, data: Data, total: int, *, flush: bool = False, **local: Any
    ) -> None:
        super().__init__(options, data)
        self._flush_at = total if flush else 0
        network = {**options.size, **data.network}
        networks = [models.build(options.model, **network) for _ in self.shards]
        self.scored_model, *others = (m.to(self.device) for m in networks)
        self.models = [self.model, *others]
        self.weights = [_FlatWeights(model) for model in self.models]
        self.optimizers = [options.make_optimizer(w.parameters()) for w in self.weights]
        self.ranks = VirtualRanks(options.workers)
        self.locals: list[LocalSteps] = self.ranks.run(lambda rank: self._open(rank, local))

    def _open(self, rank: int, local: dict[str, Any]) -> LocalSteps:
        group = self.ranks.groups[rank]
        return local_steps(self.weights[rank], self.optimizers[rank], group=group, **local)

    @property
    def bytes_sent(self) -> int:
        """Bytes that all workers together have sent so far."""
        return sum(group.bytes_sent for group in self.ranks.groups)

    def step(self, lr: float | None = None, watch: tuple[int, ...] = ()) -> Tensor:
        """Do one inner step of all workers, and the exchange if due; return their mean loss.

        watch: unused, because residuals are of weights here.
        """
        epoch, offset = divmod(self.steps, self.epoch_steps)
        batch = self.batches(epoch, offset)
        if self.passes is None:
            self.passes = GraphPasses(self.models, self.options.task.loss, batch)
        self.passes(batch)
        self._inner_step(self.passes.gradients, self.options.lr_at(epoch) if lr is None else lr)
        self.steps += 1
        if self.steps % self.locals[0].every:
            # Without an exchange no rank waits for another, so no threads are needed.
            for local_step in self.locals:
                local_step.step()
        else:
            self.ranks.run(self._exchange)
        return self.passes.losses.mean()

    def score(self) -> float:
        """Return the test score of the weights that all workers agreed on at the last exchange."""
        weights = self.locals[0].shared_weights()["flat"]
        nn.utils.vector_to_parameters(weights, self.scored_model.parameters())
        return super().score()

    def _inner_step(self, gradients: Tensor, lr: float) -> None:
        if self.options.clip:
            norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
            gradients *= (self.options.clip / (norms + 1e-6)).clamp(max=1)
        for optimizer, gradient in zip(self.optimizers, gradients, strict=True):
            (group,) = optimizer.param_groups
            group["lr"] = lr
            group["params"][0].grad = gradient
            optimizer.step()

    def _exchange(self, rank: int) -> None:
        if self.steps == self._flush_at:
            self.locals[rank].flush()
        self.locals[rank].step()
