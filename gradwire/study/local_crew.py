"""A crew whose workers each have weights of their own, and exchange them now and then."""

from typing import Any

import torch
from torch import nn

from gradwire import models
from gradwire.cluster.virtual import VirtualRanks
from gradwire.data import Data, mix
from gradwire.integrate.local import LocalSteps, local_steps
from gradwire.study.crew import Crew
from gradwire.train.options import Options


class LocalCrew(Crew):
    """`options.workers` workers in this process that call `gradwire.local_steps`.

    Seeds, order of examples and inner steps are a Crew's; `local` are local_steps' arguments.
    With `flush` the last of `total` steps sends everything.
    """

    def __init__(
        self, options: Options, data: Data, total: int, *, flush: bool = False, **local: Any
    ) -> None:
        super().__init__(options, data)
        self._flush_at = total - 1 if flush else -1
        network = {**options.size, **data.network}
        more = [models.build(options.model, **network) for _ in self.shards[1:]]
        self.models = [self.model, *(m.to(self.device) for m in more)]
        rest = [options.make_optimizer(m.parameters()) for m in self.models[1:]]
        self.optimizers = [self.optimizer, *rest]
        self.ranks = VirtualRanks(options.workers)
        self.locals: list[LocalSteps] = self.ranks.run(lambda rank: self._open(rank, local))

    def _open(self, rank: int, local: dict[str, Any]) -> LocalSteps:
        group = self.ranks.groups[rank]
        return local_steps(self.models[rank], self.optimizers[rank], group=group, **local)

    @property
    def bytes_sent(self) -> int:
        """What all workers have sent so far."""
        return sum(group.bytes_sent for group in self.ranks.groups)

    def step(self, lr: float | None = None, watch: tuple[int, ...] = ()) -> torch.Tensor:
        """An inner step of all workers, and the exchange where it is due; their mean loss."""
        epoch, offset = divmod(self.steps, self.epoch_steps)
        rate = self.options.lr_at(epoch) if lr is None else lr
        losses = self.ranks.run(lambda rank: self._inner(rank, epoch, offset, rate))
        self.steps += 1
        return torch.stack(losses).mean()

    def _inner(self, rank: int, epoch: int, offset: int, lr: float) -> torch.Tensor:
        model, optimizer = self.models[rank], self.optimizers[rank]
        for group in optimizer.param_groups:
            group["lr"] = lr
        seed = mix(self.options.seed, epoch, offset, rank)
        torch.manual_seed(seed)
        indices = next(self.shards[rank].batches(epoch, offset))
        loss = self.options.task.loss(model, self.data.training_batch(indices, seed))
        optimizer.zero_grad()
        loss.backward()
        if self.options.clip:
            nn.utils.clip_grad_norm_(model.parameters(), self.options.clip)
        optimizer.step()
        if self.steps == self._flush_at:
            self.locals[rank].flush()
        self.locals[rank].step()
        return loss.detach()
