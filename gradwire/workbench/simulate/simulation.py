"""Simulate data-parallel training: P virtual workers, one copy of the weights, P residuals."""

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
from gradwire.workbench.simulate.batched_passes import BatchedPasses
from gradwire.workbench.simulate.batches import Batches
from gradwire.workbench.simulate.graph_passes import GraphPasses, copy_per_worker
from gradwire.workbench.simulate.threaded_passes import ThreadedPasses
from gradwire.workbench.train.options import Options
from gradwire.workbench.train.task import TASKS, Batch


class Stopwatch:
    """Seconds spent in `with` blocks.

    On CUDA they are measured by events, so that the host does not wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._seconds = 0.0

    def __enter__(self) -> None:
        self._mark(-1)

    def __exit__(self, *exception: object) -> None:
        self._mark(1)

    def _mark(self, sign: int) -> None:
        if self._cuda:
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        else:
            self._seconds += sign * time.perf_counter()

    @property
    def seconds(self) -> float:
        """Sum over all blocks, after waiting for the device."""
        if self._events:
            self._events[-1].synchronize()
        for begin, end in zip(self._events[::2], self._events[1::2], strict=True):
            self._seconds += begin.elapsed_time(end) / 1e3
        self._events = []
        return self._seconds


class Simulation:
    """A training run of `options.workers` virtual workers, with the seeds of `gradwire train`.

    All workers compute gradients at the same weights, so one copy of the weights is enough. Batch
    norm keeps the running statistics of worker 0, as a checkpoint of rank 0 does.

    With one bundle and an exchange that adds in rank order, the weights equal those of real ranks
    bit for bit. The union exchange in bf16 is an exception. DDP orders the parameters in reverse,
    so there another rank keeps what rounding the mean takes away.

    On CUDA the passes of all workers are one graph. For speech they run on threads, because its
    batches differ in shape. With `batched` they are one batch, with activations in bf16. In a
    graph, dropout draws from torch's generator; elsewhere each worker is seeded at each step.
    """

    def __init__(self, options: Options, data: Data, *, batched: bool = False) -> None:
        self.options, self.device = options, torch.device(options.device)
        self._batched = batched and self.device.type == "cuda"
        self.activations = "bf16" if self._batched else "fp32"
        self.data = data.to(self.device)
        self.shards = [
            Shard(data.examples, options.batch, rank, options.workers, options.seed)
            for rank in range(options.workers)
        ]
        torch.manual_seed(blake2b_seed(options.seed))
        network = {**options.size, **data.network}
        self.model = models.build(options.model, **network).to(self.device)
        self.scored_model = self.model
        """The network that `score` evaluates."""
        self.parameters = list(self.model.parameters())
        self.optimizer = options.make_optimizer(self.parameters)
        self.cluster = VirtualCluster(options.workers, options.config(self.epoch_steps))
        self.entries = sum(p.numel() for p in self.parameters)
        self.batches = Batches(self.data, self.shards, self.device)
        self.passes: GraphPasses | BatchedPasses | None = None
        self.threaded: ThreadedPasses | None = None
        self.steps = self.exchanges = 0
        self.gradients: list[Tensor] = []
        self.watched_residuals: list[Tensor] = []
        self.update = torch.zeros(0, dtype=torch.float32)
        self.computing = Stopwatch(self.device)
        """Time of the forward and backward passes of all workers."""

    @classmethod
    def from_options(cls, options: Options) -> "Simulation":
        """Return a simulation on the data set that the options name."""
        return cls(options, load_examples(options))

    @property
    def epoch_steps(self) -> int:
        return self.shards[0].steps

    @property
    def residual_bytes(self) -> int:
        """Memory that the residuals of all workers take."""
        return 4 * self.entries * self.options.workers

    @property
    def bytes_sent(self) -> int:
        """Bytes that all workers together have sent so far."""
        if not self.exchanges:
            return 0
        return sum(self.cluster.stats(rank).bytes_sent for rank in range(self.options.workers))

    @property
    def entries_chosen(self) -> int:
        """Number of entries that one worker has chosen so far.

        A step that sent everything counts all entries.
        """
        if not self.exchanges:
            return 0
        config, dense = self.cluster.config, self.cluster.stats().dense
        if config.method == "dense":
            return self.entries * self.exchanges
        sizes = [
            entry_count(config.schedule.density_at(i), self.entries) for i in range(self.exchanges)
        ]
        # A bundle is sent whole by a flush, or when fewer entries would take more bytes.
        whole = dense.get("flush", 0) + dense.get("bytes", 0)
        return sum(sizes) + whole * (self.entries - sizes[-1])

    def step(self, lr: float | None = None, watch: tuple[int, ...] = ()) -> Tensor:
        """Train all workers for one step; return their mean loss, which stays on the device.

        watch: the workers whose residuals before this step are recorded, for `u`.
        """
        epoch, offset = divmod(self.steps, self.epoch_steps)
        rate = self.options.lr_at(epoch + offset / self.epoch_steps) if lr is None else lr
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.options.follow_lr:
            self.cluster.follow_lr(rate)
        with self.computing:
            self.gradients, losses = self._gradients(epoch, offset)
        begun = self.steps > 0
        self.watched_residuals = [
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
        """Return everything that the next step depends on."""
        cuda = self.device.type == "cuda"
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "cluster": self.cluster.state_dict() if self.exchanges else None,
            "counts": [self.steps, self.exchanges],
            "random": torch.cuda.get_rng_state() if cuda else None,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore a `state_dict`; the steps that follow repeat bit for bit."""
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if saved["cluster"] is not None:
            self.cluster.load_state_dict(saved["cluster"])
        self.steps, self.exchanges = saved["counts"]
        if saved["random"] is not None:
            torch.cuda.set_rng_state(saved["random"].cpu())

    def flush(self) -> None:
        """Make the next step send the whole residual."""
        self.cluster.flush()

    def u(self, worker: int = 0) -> Tensor:
        """Return gradient + residual of the last step, for `watch[worker]` of that step.

        `watch` of that step must list the workers 0, 1, ... in order.
        """
        return self.gradients[worker] + self.watched_residuals[worker].to(self.device)

    @torch.no_grad()
    def score(self) -> float:
        """Return the task's score on the test set."""
        task, data, model = self.options.task, self.data, self.scored_model
        model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for first in range(0, data.test_examples, data.at_once):
            stop = min(first + data.at_once, data.test_examples)
            sums += task.count(model, data.test_batch(first, stop))
        model.train()
        return task.score(sums)

    def _gradients(self, epoch: int, offset: int) -> tuple[list[Tensor], Tensor]:
        """Return each worker's flat gradient, and all losses."""
        if self.device.type != "cuda":
            return self._gradients_in_turn(epoch, offset)
        if self.options.task is TASKS["speech"]:
            # Utterances differ in length, and a graph needs fixed shapes.
            return self._gradients_on_threads(epoch, offset)
        batch = self.batches(epoch, offset)
        if self.passes is None:
            self.passes = self._open_passes(batch)
        self.passes(batch)
        return list(self.passes.gradients), self.passes.losses

    def _open_passes(self, batch: Batch) -> GraphPasses | BatchedPasses:
        workers, loss = self.options.workers, self.options.task.loss
        if self._batched:
            return BatchedPasses(self.model, workers, loss, batch)
        return GraphPasses(copy_per_worker(self.model, workers), loss, batch)

    def _gradients_in_turn(self, epoch: int, offset: int) -> tuple[list[Tensor], Tensor]:
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

    def _gradients_on_threads(self, epoch: int, offset: int) -> tuple[list[Tensor], Tensor]:
        if self.threaded is None:
            self.threaded = ThreadedPasses(
                copy_per_worker(self.model, self.options.workers), self.device
            )
        batches = [next(shard.batches(epoch, offset)) for shard in self.shards]

        def loss(model: nn.Module, rank: int) -> Tensor:
            seed = blake2b_seed(self.options.seed, epoch, offset, rank)
            return self.options.task.loss(model, self.data.training_batch(batches[rank], seed))

        flat, losses = self.threaded(loss)
        return flat, torch.stack(losses)

    def _parts(self, flat: Tensor) -> tuple[Tensor, ...]:
        return flat.split([p.numel() for p in self.parameters])


def load_examples(options: Options) -> Data:
    """Return the data set that the options name. The last one is cached."""
    return _load_cached(options.data, options.data_dir, models.model_spec(options.model).shape)


@lru_cache(maxsize=1)
def _load_cached(name: str, folder: str | None, shape: tuple[int, ...]) -> Data:
    return datasets.load_dataset(name, folder, shape)
