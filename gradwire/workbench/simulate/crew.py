"""A crew: P virtual workers that train one copy of the weights, each with its own residual."""

import time
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.accumulate.schedule import entry_count
from gradwire.hashing import blake2b_seed
from gradwire.integrate.virtual_cluster import VirtualCluster
from gradwire.workbench import data as datasets
from gradwire.workbench import models
from gradwire.workbench.data import Data, Shard
from gradwire.workbench.simulate.abreast import Abreast
from gradwire.workbench.simulate.batches import Batches
from gradwire.workbench.simulate.graphs import Passes, twins
from gradwire.workbench.simulate.lanes import Lanes
from gradwire.workbench.train.options import Options
from gradwire.workbench.train.task import TASKS, Batch


class Stopwatch:
    """Seconds of a block; on CUDA by events that are read when asked for."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._seconds = 0.0

    def __enter__(self) -> None:
        self._mark(-1)

    def __exit__(self, *what: object) -> None:
        self._mark(1)

    def _mark(self, sign: int) -> None:
        if self._cuda:
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        else:
            self._seconds += sign * time.perf_counter()

    @property
    def seconds(self) -> float:
        """In all; waits for the device."""
        if self._events:
            self._events[-1].synchronize()
        for begin, end in zip(self._events[::2], self._events[1::2], strict=True):
            self._seconds += begin.elapsed_time(end) / 1e3
        self._events = []
        return self._seconds


class Crew:
    """`options.workers` workers in this process, by the seeds and steps of `gradwire train`.

    Every worker's gradient is of the same weights, so one copy is enough. Batch norm keeps worker
    0's running statistics, as a rank 0 checkpoint does. With one bundle and a rank-ordered
    exchange the weights are those of real ranks, bit for bit (of a union in bf16 another rank keeps
    what the mean loses, for DDP has the parameters in reverse). On CUDA the passes of all workers
    are one graph, or, where batches differ in shape, as those of speech do, run side by side; there
    dropout draws from torch's generator, elsewhere every worker's is seeded at every step. With
    `abreast` they are one batch there, with activations in bf16.
    """

    def __init__(self, options: Options, data: Data, *, abreast: bool = False) -> None:
        self.options, self.device = options, torch.device(options.device)
        self._abreast = abreast and self.device.type == "cuda"
        self.activations = "bf16" if self._abreast else "fp32"
        self.data = data.to(self.device)
        self.shards = [
            Shard(data.examples, options.batch, rank, options.workers, options.seed)
            for rank in range(options.workers)
        ]
        torch.manual_seed(blake2b_seed(options.seed))
        network = {**options.size, **data.network}
        self.model = models.build(options.model, **network).to(self.device)
        self.judged = self.model
        """Whose score counts."""
        self.parameters = list(self.model.parameters())
        self.optimizer = options.make_optimizer(self.parameters)
        self.cluster = VirtualCluster(options.workers, options.config(self.epoch_steps))
        self.entries = sum(p.numel() for p in self.parameters)
        self.batches = Batches(self.data, self.shards, self.device)
        self.passes: Passes | Abreast | None = None
        self.lanes: Lanes | None = None
        self.steps = self.exchanges = 0
        self.gradients: list[Tensor] = []
        self.kept: list[Tensor] = []
        self.update = torch.zeros(0, dtype=torch.float32)
        self.computing = Stopwatch(self.device)
        """Forward and backward passes of all workers."""

    @classmethod
    def of(cls, options: Options) -> "Crew":
        """A crew on the data that the options name."""
        return cls(options, examples(options))

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
        if not self.exchanges:
            return 0
        return sum(self.cluster.stats(rank).bytes_sent for rank in range(self.options.workers))

    @property
    def chosen(self) -> int:
        """Entries that a worker has chosen so far, all of them where everything was sent."""
        if not self.exchanges:
            return 0
        config, dense = self.cluster.config, self.cluster.stats().dense
        if config.method == "dense":
            return self.entries * self.exchanges
        sizes = [
            entry_count(config.schedule.density_at(i), self.entries) for i in range(self.exchanges)
        ]
        whole = dense.get("flush", 0) + dense.get("bytes", 0)
        return sum(sizes) + whole * (self.entries - sizes[-1])

    def step(self, lr: float | None = None, watch: tuple[int, ...] = ()) -> Tensor:
        """One step of all workers; their mean loss, on the device. Notes residuals of `watch`."""
        epoch, offset = divmod(self.steps, self.epoch_steps)
        rate = self.options.lr_at(epoch + offset / self.epoch_steps) if lr is None else lr
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.options.follow_lr:
            self.cluster.follow_lr(rate)
        with self.computing:
            self.gradients, losses = self._gradients(epoch, offset)
        begun = self.steps > 0
        self.kept = [
            self.cluster.residual(r) if begun else torch.zeros((), dtype=torch.float32)
            for r in watch
        ]
        self.update = self.cluster.average(self.gradients)
        for parameter, part in zip(self.parameters, self._parts(self.update), strict=True):
            parameter.grad = part.view_as(parameter)
        if self.options.clip:
            nn.utils.clip_grad_norm_(self.parameters, self.options.clip)
        self.optimizer.step()
        self.steps += 1
        self.exchanges += 1
        return losses.mean()

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on."""
        cuda = self.device.type == "cuda"
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "cluster": self.cluster.state_dict() if self.exchanges else None,
            "counts": [self.steps, self.exchanges],
            "random": torch.cuda.get_rng_state() if cuda else None,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, bit for bit."""
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if saved["cluster"] is not None:
            self.cluster.load_state_dict(saved["cluster"])
        self.steps, self.exchanges = saved["counts"]
        if saved["random"] is not None:
            torch.cuda.set_rng_state(saved["random"].cpu())

    def flush(self) -> None:
        """The next step sends everything that is kept."""
        self.cluster.flush()

    def u(self, worker: int = 0) -> Tensor:
        """gradient + residual of the `worker`-th of those that the last step watched."""
        return self.gradients[worker] + self.kept[worker].to(self.device)

    @torch.no_grad()
    def score(self) -> float:
        """The task's score on the test set."""
        task, data, model = self.options.task, self.data, self.judged
        model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for first in range(0, data.test_examples, data.at_once):
            stop = min(first + data.at_once, data.test_examples)
            sums += task.count(model, data.test_batch(first, stop))
        model.train()
        return task.score(sums)

    def _gradients(self, epoch: int, offset: int) -> tuple[list[Tensor], Tensor]:
        """Each worker's flat gradient, and all losses."""
        if self.device.type != "cuda":
            return self._one_by_one(epoch, offset)
        if self.options.task is TASKS["speech"]:
            return self._side_by_side(epoch, offset)
        batch = self.batches(epoch, offset)
        if self.passes is None:
            self.passes = self._open_passes(batch)
        self.passes(batch)
        return list(self.passes.gradients), self.passes.losses

    def _open_passes(self, batch: Batch) -> Passes | Abreast:
        workers, loss = self.options.workers, self.options.task.loss
        if self._abreast:
            return Abreast(self.model, workers, loss, batch)
        return Passes(twins(self.model, workers), loss, batch)

    def _one_by_one(self, epoch: int, offset: int) -> tuple[list[Tensor], Tensor]:
        flat, losses, statistics = [], [], []
        for rank, shard in enumerate(self.shards):
            seed = blake2b_seed(self.options.seed, epoch, offset, rank)
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
        return flat, torch.stack(losses)

    def _side_by_side(self, epoch: int, offset: int) -> tuple[list[Tensor], Tensor]:
        if self.lanes is None:
            self.lanes = Lanes(twins(self.model, self.options.workers), self.device)
        batches = [next(shard.batches(epoch, offset)) for shard in self.shards]

        def loss(model: nn.Module, rank: int) -> Tensor:
            seed = blake2b_seed(self.options.seed, epoch, offset, rank)
            return self.options.task.loss(model, self.data.training_batch(batches[rank], seed))

        flat, losses = self.lanes(loss)
        return flat, torch.stack(losses)

    def _parts(self, flat: Tensor) -> tuple[Tensor, ...]:
        return flat.split([p.numel() for p in self.parameters])


def examples(options: Options) -> Data:
    """The data that the options name, which are read once."""
    return _load(options.data, options.data_dir, models.model_spec(options.model).shape)


@lru_cache(maxsize=1)
def _load(name: str, folder: str | None, shape: tuple[int, ...]) -> Data:
    return datasets.load_dataset(name, folder, shape)
