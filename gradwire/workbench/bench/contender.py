"""Contenders of `bench step`: ways to average gradients, all on one shared model.

The model, its inputs and its optimiser are made once (Task). Each contender wraps them in a
DistributedDataParallel with a hook of its own (Contender).
"""

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
from gradwire.torch_internals import batch_norm
from gradwire.workbench.bench.job import Job
from gradwire.workbench.models import model_spec

LEARNING_RATE = 1e-4
POWERSGD_START = 2
"""Steps that PowerSGD averages uncompressed; its state takes no number below 2."""
ONE_BUCKET_MB = 1 << 20
"""A bucket size that holds any model."""


class Task:
    """The network, its inputs and its optimiser, which all contenders share.

    shares: True if other ranks use this GPU too. on_step: called at the beginning of each step.
    """

    def __init__(
        self,
        job: Job,
        device: torch.device,
        rank: int,
        shares: bool = False,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        spec = model_spec(job.model)
        # The same seed on every rank makes the parameters equal without a broadcast.
        torch.manual_seed(0)
        with device:
            self.model = spec.build()
        if shares:
            without_cudnn(self.model)
        self.device, self.on_step = device, on_step
        torch.manual_seed(rank + 1)
        self.inputs = synthetic_batch(spec.task, spec.shape, self.model, job.batch, device)
        if device.type == "cuda" and self.inputs.dim() == 4:
            # The layout to train in on a GPU: convolutions in others take 1.4 times as long.
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
        """Entries of all parameters that are trained."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def forward(self, ddp: nn.Module) -> Tensor:
        """Return the loss of one forward pass through `ddp`."""
        with self._precision():
            scores = ddp(self.inputs)
            return cross_entropy(scores.flatten(0, -2), self.targets)

    def update(self) -> None:
        """Take the optimiser's step, and drop the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _precision(self) -> AbstractContextManager[object]:
        if not self._autocast:
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)


def synthetic_batch(
    task: str, shape: tuple[int, ...], model: nn.Module, batch: int, device: torch.device
) -> Tensor:
    """Return a batch of noise, or of random tokens for a network that reads words."""
    if task != "language":
        dtype = next(model.parameters()).dtype
        return torch.randn(batch, *shape, dtype=dtype, device=device)
    words = next(m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
    return torch.randint(words, (batch, *shape), dtype=torch.int64, device=device)


@dataclass
class Contender:
    """A DDP around the shared model, with one method's hook.

    Several DDP objects may share parameters: only the DDP whose forward pass ran last expects the
    gradients. config and wire: None for PyTorch's own methods.
    """

    name: str
    ddp: DistributedDataParallel
    config: Config | None = None
    wire: Attached | None = None

    @classmethod
    def build(
        cls, name: str, job: Job, task: Task, group: dist.ProcessGroup | None = None
    ) -> "Contender":
        """Build the contender `name`; `group` is that of all ranks if None."""
        # The option's name depends on torch's version. Buffers are not broadcast, because `noop`
        # would have to wait for the broadcast too.
        known = inspect.signature(DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        # No init_sync: the parameters are equal by their seed, and each broadcast would take long.
        arguments: dict[str, Any] = {buffers: False, "init_sync": False, "process_group": group}
        if job.bucket_mb:
            arguments["bucket_cap_mb"] = job.bucket_mb
        if name.startswith("powersgd") and task.device.type == "cpu":
            # PowerSGD starts collectives in callbacks; on Gloo two buckets would mix theirs up.
            arguments["bucket_cap_mb"] = ONE_BUCKET_MB
        ddp = DistributedDataParallel(task.model, **arguments)
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
        """Take one training step."""
        task.on_step()
        task.forward(self.ddp).backward()
        if self.name == "barrier":
            dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=task.device))
        task.update()

    def bytes_of(self, entries: int, ranks: int) -> int | None:
        """Return the bytes per step that leave a rank, by formula; None for methods without one.

        PyTorch's methods have formulas, except PowerSGD. gradwire counts its bytes.
        """
        width = {"noop": 0, "barrier": 0, "dense": 4, "bf16": 2}.get(self.name)
        return None if width is None else 2 * (ranks - 1) * width * entries // ranks


def without_cudnn(model: nn.Module) -> None:
    """Run the model's batch norms without cuDNN from now on, for ranks that share a GPU.

    cuDNN's batch norm for fp32 in channels_last needs every multiprocessor at once, and waits while
    a collective runs on one (pytorch/pytorch#80259). On a shared GPU the collective may belong to
    another rank, which waits for this one. Then neither rank goes on.
    """
    kind = batch_norm()
    for module in model.modules():
        if isinstance(module, kind):
            module.register_forward_pre_hook(_cudnn_off)
            module.register_forward_hook(_cudnn_on, always_call=True)


def _cudnn_off(*_: Any) -> None:
    torch.backends.cudnn.enabled = False


def _cudnn_on(*_: Any) -> None:
    torch.backends.cudnn.enabled = True
