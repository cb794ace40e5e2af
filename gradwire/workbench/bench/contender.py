"""One way of averaging gradients, on a model that several of them share."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from gradwire.config import Config
from gradwire.integrate.attached import Attached
from gradwire.integrate.ddp import attach
from gradwire.workbench.bench.job import Job
from gradwire.workbench.bench.norms import without_cudnn
from gradwire.workbench.models import model_spec

LEARNING_RATE = 1e-4
POWERSGD_START = 2
ONE_BUCKET_MB = 1 << 20


class Task:
    """The network, its examples and its optimiser: what is the same for every contender.

    shares: whether other ranks are on this GPU too. begins: called when a step does.
    """

    def __init__(
        self,
        job: Job,
        device: torch.device,
        rank: int,
        shares: bool = False,
        begins: Callable[[], None] = lambda: None,
    ) -> None:
        known = model_spec(job.model)
        torch.manual_seed(0)
        with device:
            self.model = known.build()
        if shares:
            without_cudnn(self.model)
        self.device, self.begins = device, begins
        torch.manual_seed(rank + 1)
        self.inputs = examples(known.task, known.shape, self.model, job.batch, device)
        if device.type == "cuda" and self.inputs.dim() == 4:
            # As one would train there: convolutions of other layouts take 1.4 times as long.
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.inputs = self.inputs.contiguous(memory_format=torch.channels_last)
        with torch.no_grad():
            scores = self.model.eval()(self.inputs[:1])
        self.model.train()
        shape = (job.batch, *scores.shape[1:-1])
        self.targets = torch.randint(
            scores.shape[-1], shape, dtype=torch.int64, device=device
        ).flatten()
        fused = device.type == "cuda"
        self.optimizer = torch.optim.SGD(self.model.parameters(), LEARNING_RATE, fused=fused)
        self._autocast = job.autocast == "bf16"

    @property
    def entries(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def forward(self, ddp: nn.Module) -> Tensor:
        with self._precision():
            scores = ddp(self.inputs)
            return cross_entropy(scores.flatten(0, -2), self.targets)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _precision(self) -> AbstractContextManager[object]:
        if not self._autocast:
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)


def examples(
    task: str, shape: tuple[int, ...], model: nn.Module, batch: int, device: torch.device
) -> Tensor:
    """A batch of noise, or of random tokens where the network reads words."""
    if task != "language":
        dtype = next(model.parameters()).dtype
        return torch.randn(batch, *shape, dtype=dtype, device=device)
    words = next(m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
    return torch.randint(words, (batch, *shape), dtype=torch.int64, device=device)


@dataclass
class Contender:
    """A DDP around the shared model with one hook.

    Several DDP objects may share parameters: only the one whose forward pass ran last expects
    their gradients. Buffers are not broadcast: `noop` would have to wait for that too.
    """

    name: str
    ddp: DistributedDataParallel
    config: Config | None = None
    wire: Attached | None = None

    @classmethod
    def of(
        cls, name: str, job: Job, task: Task, group: dist.ProcessGroup | None = None
    ) -> "Contender":
        known = inspect.signature(DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        # Parameters are equal by their seed; sending them around once a method would take long.
        more: dict[str, Any] = {buffers: False, "init_sync": False, "process_group": group}
        if job.bucket_mb:
            more["bucket_cap_mb"] = job.bucket_mb
        if name.startswith("powersgd") and task.device.type == "cpu":
            # Its collectives start in callbacks: on Gloo those of two buckets get mixed up.
            more["bucket_cap_mb"] = ONE_BUCKET_MB
        ddp = DistributedDataParallel(task.model, **more)
        config = job.config(name)
        if config is not None:
            return cls(name, ddp, config, attach(ddp, config))
        if name in ("noop", "barrier"):
            ddp.register_comm_hook(None, noop_hook)
        elif name == "bf16":
            ddp.register_comm_hook(group, bf16_compress_hook)
        elif name.startswith("powersgd-"):
            rank = int(name.partition("-")[2])
            state = powersgd.PowerSGDState(group, rank, start_powerSGD_iter=POWERSGD_START)
            ddp.register_comm_hook(state, powersgd.powerSGD_hook)
        return cls(name, ddp)

    def step(self, task: Task) -> None:
        task.begins()
        task.forward(self.ddp).backward()
        if self.name == "barrier":
            dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=task.device))
        task.update()

    def bytes_of(self, entries: int, ranks: int) -> int | None:
        """What leaves a rank in a step of PyTorch's own, by formula, where there is one."""
        width = {"noop": 0, "barrier": 0, "dense": 4, "bf16": 2}.get(self.name)
        return None if width is None else 2 * (ranks - 1) * width * entries // ranks
