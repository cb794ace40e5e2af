"""A crew: P virtual workers that train one copy of the weights, each with its own residual."""

import time
from functools import lru_cache

import torch
from torch import Tensor, nn

from gradwire import data as datasets
from gradwire import models
from gradwire.cluster.local import VirtualCluster
from gradwire.data import Data, Shard, mix
from gradwire.train.options import Options


class Crew:
    """`options.workers` workers in this process, by the seeds and steps of `gradwire train`.

    Every worker's gradient is of the same weights, so one copy is enough. Batch norm keeps worker
    0's running statistics, as a rank 0 checkpoint does. With one bundle and a rank-ordered
    exchange the weights are those of real ranks, bit for bit.
    """

    def __init__(self, options: Options, data: Data) -> None:
        self.options, self.device = options, torch.device(options.device)
        self.data = data.to(self.device)
        self.shards = [
            Shard(data.examples, options.batch, rank, options.workers, options.seed)
            for rank in range(options.workers)
        ]
        torch.manual_seed(mix(options.seed))
        network = {**options.size, **data.network}
        self.model = models.build(options.model, **network).to(self.device)
        self.parameters = list(self.model.parameters())
        self.optimizer = options.make_optimizer(self.parameters)
        self.cluster = VirtualCluster(options.workers, options.config())
        self.entries = sum(p.numel() for p in self.parameters)
        self.steps = 0
        self.gradients: list[Tensor] = []
        self.kept: list[Tensor] = []
        self.update = torch.zeros(0)
        self.compute_seconds = 0.0
        """Forward and backward passes of all workers."""

    @classmethod
    def of(cls, options: Options) -> "Crew":
        """A crew on the data that the options name, which are read once."""
        shape = models.spec(options.model).shape
        return cls(options, _load(options.data, options.data_dir, shape))

    @property
    def replicas(self) -> list[nn.Module]:
        """The copies of the network."""
        return [self.model]

    @property
    def epoch_steps(self) -> int:
        return self.shards[0].steps

    @property
    def residual_bytes(self) -> int:
        """Memory of all workers' residuals."""
        return 4 * self.entries * self.options.workers

    @property
    def bytes_sent(self) -> int:
        """What all workers have sent so far."""
        return sum(self.cluster.stats(rank).bytes_sent for rank in range(self.options.workers))

    def step(self, lr: float | None = None, watch: tuple[int, ...] = ()) -> float:
        """One step of all workers; returns their mean loss. Notes the residuals of `watch`."""
        epoch, offset = divmod(self.steps, self.epoch_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr_at(epoch) if lr is None else lr
        begin = time.perf_counter()
        self.gradients, losses = self._gradients(epoch, offset)
        loss = float(torch.stack(losses).mean())
        self.compute_seconds += time.perf_counter() - begin
        begun = self.steps > 0
        self.kept = [self.cluster.residual(r) if begun else torch.zeros(()) for r in watch]
        self.update = self.cluster.average(self.gradients)
        for parameter, part in zip(self.parameters, self._parts(self.update), strict=True):
            parameter.grad = part.view_as(parameter)
        if self.options.clip:
            nn.utils.clip_grad_norm_(self.parameters, self.options.clip)
        self.optimizer.step()
        self.steps += 1
        return loss

    def u(self, worker: int = 0) -> Tensor:
        """gradient + residual of the `worker`-th of those that the last step watched."""
        return self.gradients[worker] + self.kept[worker].to(self.device)

    @torch.no_grad()
    def score(self) -> float:
        """The task's score on the test set."""
        task, data = self.options.task, self.data
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for first in range(0, data.test_examples, data.at_once):
            stop = min(first + data.at_once, data.test_examples)
            sums += task.count(self.model, data.test_batch(first, stop))
        self.model.train()
        return task.score(sums)

    def _gradients(self, epoch: int, offset: int) -> tuple[list[Tensor], list[Tensor]]:
        """Each worker's flat gradient and loss."""
        flat, losses, statistics = [], [], []
        for rank, shard in enumerate(self.shards):
            seed = mix(self.options.seed, epoch, offset, rank)
            torch.manual_seed(seed)
            indices = next(shard.batches(epoch, offset))
            loss = self.options.task.loss(self.model, self.data.training_batch(indices, seed))
            gradients = torch.autograd.grad(loss, self.parameters)
            flat.append(torch.cat([g.reshape(-1) for g in gradients]))
            losses.append(loss.detach())
            if rank == 0:
                statistics = [buffer.clone() for buffer in self.model.buffers()]
            else:
                for buffer, first in zip(self.model.buffers(), statistics, strict=True):
                    buffer.copy_(first)
        return flat, losses

    def _parts(self, flat: Tensor) -> tuple[Tensor, ...]:
        return flat.split([p.numel() for p in self.parameters])


@lru_cache(maxsize=1)
def _load(name: str, folder: str | None, shape: tuple[int, ...]) -> Data:
    return datasets.load(name, folder, shape)
