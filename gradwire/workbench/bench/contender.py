"""Contenders of `bench step`: ways to average gradients, all on one shared model.

The model, its inputs and its optimiser are made once (Task). Each contender wraps them in a
DistributedDataParallel with a hook of its own. Those with local steps are in local.py.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from gradwire.config import Config
from gradwire.integrate.ddp import attach
from gradwire.state.state import State
from gradwire.workbench.bench.job import Job
from gradwire.workbench.bench.task import Task

POWERSGD_START = 2
"""Steps that PowerSGD averages uncompressed; its state takes no number below 2."""
ONE_BUCKET_MB = 1 << 20
"""A bucket size that holds any model."""


@dataclass
class Contender:
    """A DDP around the shared model, with one method's hook.

    Several DDP objects may share parameters: only the DDP whose forward pass ran last expects the
    gradients. config and wire: None for PyTorch's own methods.
    """

    name: str
    model: nn.Module
    """The model that runs forward: a DDP, or the plain one."""
    config: Config | None = None
    wire: State | None = None

    @classmethod
    def build(
        cls, name: str, job: Job, task: Task, group: dist.ProcessGroup | None = None
    ) -> "Contender":
        """Build the contender `name`; `group` is that of all ranks if None."""
        # PowerSGD starts collectives in callbacks; on Gloo two buckets would mix theirs up.
        one_bucket = name.startswith("powersgd") and task.device.type == "cpu"
        ddp = wrap(task.model, ONE_BUCKET_MB if one_bucket else job.bucket_mb, group)
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
        self.wait_for_kernels()
        task.on_step()
        task.forward(self.model).backward()
        if self.name == "barrier":
            dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=task.device))
        task.update()

    def wait_for_kernels(self) -> None:
        """Let no step run on torch's operations while kernels are being compiled."""
        if self.wire is not None:
            self.wire.wait_for_kernels()

    @property
    def period(self) -> int:
        """Steps of a round; 1 if gradients are averaged at every step."""
        return 1

    @property
    def lead(self) -> int:
        """Steps at the beginning of a turn that are not timed."""
        return 1

    def begin_turn(self) -> None:
        """Begin to train after other contenders."""

    def end_turn(self) -> None:
        """Leave the model to other contenders."""

    def whole_steps(self, steps: int) -> float:
        """Return the number of steps that sent as much as the last `steps`, on the mean."""
        return steps

    def close(self) -> None:
        """Give the communicators back."""
        if self.wire is not None:
            self.wire.close()

    def bytes_of(self, entries: int, ranks: int) -> int | None:
        """Return the bytes per step that leave a rank, by formula; None for methods without one.

        PyTorch's methods have formulas, except PowerSGD. gradwire counts its bytes.
        """
        width = {"noop": 0, "barrier": 0, "dense": 4, "bf16": 2}.get(self.name)
        return None if width is None else 2 * (ranks - 1) * width * entries // ranks


def wrap(
    model: nn.Module, bucket_mb: float, group: dist.ProcessGroup | None
) -> DistributedDataParallel:
    """Return a DDP around the model that sends nothing but gradients; bucket_mb: 0 is DDP's."""
    # The option's name depends on torch's version. Buffers are not broadcast, because `noop`
    # would have to wait for the broadcast too.
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    # No init_sync: the parameters are equal by their seed, and each broadcast would take long.
    arguments: dict[str, Any] = {buffers: False, "init_sync": False, "process_group": group}
    if bucket_mb:
        arguments["bucket_cap_mb"] = bucket_mb
    return DistributedDataParallel(model, **arguments)
