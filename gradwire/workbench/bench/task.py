"""The training task of `bench step`: one network, its inputs and its optimisers."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradwire.optim import muon
from gradwire.torch_internals import batch_norm
from gradwire.workbench.bench.job import Job
from gradwire.workbench.models import model_spec

LEARNING_RATE = 1e-4


class Task:
    """The network, its inputs and its optimisers, which all contenders share.

    shares: True if other ranks use this GPU too. on_step: called at the beginning of each step.
    inside, across: with islands, the ranks of this island, and this rank's place in all islands.
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
        self.optimizer = self._build_optimizer(job.optimizer)
        """Steps with averaged gradients."""
        self.inside: dist.ProcessGroup | None = None
        self.across: dist.ProcessGroup | None = None
        if job.islands:
            self.inside, self.across = island_groups(job.islands, dist.get_world_size())
        self._autocast = job.autocast == "bf16"

    def _build_optimizer(self, kind: str) -> torch.optim.Optimizer:
        if kind == "muon":
            return self.muon
        made = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[kind]
        fused = self.device.type == "cuda"
        return made(self.model.parameters(), LEARNING_RATE, fused=fused)

    @cached_property
    def muon(self) -> torch.optim.Optimizer:
        """The optimiser of local steps: Muon for hidden matrices, and AdamW for the rest."""
        return muon(self.model, LEARNING_RATE)

    @property
    def entries(self) -> int:
        """Entries of all parameters that are trained."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    @property
    def tokens(self) -> int:
        """Tokens of a batch; 0 for a network that reads no text."""
        return 0 if self.inputs.is_floating_point() else self.inputs.numel()

    def forward(self, model: nn.Module) -> Tensor:
        """Return the loss of one forward pass through the network, or a wrapper of it."""
        with self._precision():
            scores = model(self.inputs)
            return cross_entropy(scores.flatten(0, -2), self.targets)

    def update(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Take a step of the optimiser, the one of averaged gradients if None; drop gradients."""
        optimizer = optimizer or self.optimizer
        optimizer.step()
        optimizer.zero_grad()

    def _precision(self) -> AbstractContextManager[object]:
        if not self._autocast:
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)


def synthetic_batch(
    task: str, shape: tuple[int, ...], model: nn.Module, batch: int, device: torch.device
) -> Tensor:
    """Return a batch of noise, or of random tokens for a network that reads text."""
    if task not in ("language", "bytes"):
        dtype = next(model.parameters()).dtype
        return torch.randn(batch, *shape, dtype=dtype, device=device)
    words = next(m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
    return torch.randint(words, (batch, *shape), dtype=torch.int64, device=device)


def island_groups(islands: int, world: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the ranks of this rank's island, and its counterparts in all islands (collective)."""
    table = torch.arange(world, dtype=torch.int64).reshape(islands, -1)
    inside, _ = dist.new_subgroups_by_enumeration(table.tolist())
    across, _ = dist.new_subgroups_by_enumeration(table.T.tolist())
    assert inside is not None
    assert across is not None
    return inside, across


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
