"""Checkpoint folders of two ranks after made gradients, and what they hold.

The loss is the sum of parameter times made number, so gradients are these numbers to the bit.
"""

import contextlib
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from tests.golden.cases import digest, gradient, momentum_of, numbers

SHAPES = {"first": (23, 11), "second": (70,), "third": (3, 5, 4), "last": (1,)}
SIZE = sum(int(np.prod(shape)) for shape in SHAPES.values())
STEPS, MORE = 5, 3
PLAIN = {
    "density": 0.05,
    "momentum": 0.9,
    "values": "int8",
    "indices": "packed",
    "rounding": "stochastic",
    "dense_below": 0,
    "bundle_mb": 0.0008,
}
LOCAL = {"every": 2, "density": 0.2, "dense_below": 0}
SHARDED = {"density": 0.1, "values": "bf16", "dense_below": 0}
KINDS = ("plain", "local", "sharded")


class Made(nn.Module):
    """Parameters whose gradients are what it is called with."""

    def __init__(self):
        super().__init__()
        made = parts(numbers(5, SIZE, -99, 99).astype(np.float32) * np.float32(2.0**-6))
        for name, value in made.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, made):
        return sum((getattr(self, name) * part).sum() for name, part in made.items())


def parts(flat):
    """A flat vector, by parameter."""
    ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES.values()])[:-1]
    pairs = zip(SHAPES.items(), np.split(flat, ends), strict=True)
    return {name: torch.from_numpy(part.reshape(shape).copy()) for (name, shape), part in pairs}


class Job:
    """One rank's model, optimiser and wire."""

    def __init__(self, kind, axes=None):
        self.kind, self.net = kind, Made()
        self.model = self.net
        if kind == "plain":
            self.model = DistributedDataParallel(self.net)
        if kind == "sharded":
            fully_shard(self.net, mesh=axes["shard"])
        # Powers of two: its steps round once, wherever multiplication and addition fuse.
        self.optimizer = torch.optim.SGD(
            self.net.parameters(), lr=2.0**-5, momentum=0.5 if kind == "local" else 0.0
        )
        if kind == "plain":
            self.wire = gradwire.attach(self.model, **PLAIN)
        elif kind == "local":
            self.wire = gradwire.local_steps(self.net, self.optimizer, **LOCAL)
        else:
            group = axes["replicate"].get_group()
            self.wire = gradwire.attach(self.model, replicate_group=group, **SHARDED)

    def train(self, rank, start, steps):
        """Steps on made gradients; the sha256 of all updates, or of the weights of local steps."""
        seen = []
        for step in range(start, start + steps):
            self.optimizer.zero_grad()
            self.model(parts(gradient(rank, 500 + step, SIZE))).backward()
            self.optimizer.step()
            if self.kind == "local":
                self.wire.step()
            seen += [whole(p if self.kind == "local" else p.grad) for p in self.net.parameters()]
        return digest(*seen)

    def kept(self):
        """Name -> what this rank holds: residuals, and momentum or weights where there are any."""
        saved = self.wire.state_dict()
        if self.kind == "sharded":
            (saved,) = saved.values()
            # What was delivered is not settled in it: only a folder that was resized has no such.
            return {f"u {n}": whole(t).numpy() for n, t in saved["residual"].items()}
        out = {f"residual {n}": self.wire.residual(n).numpy() for n in SHAPES}
        if self.kind == "plain":
            return out | {f"velocity {n}": t.numpy() for n, t in momentum_of(self.wire).items()}
        weights = {f"weight {n}": p.detach().numpy().copy() for n, p in self.net.named_parameters()}
        shared = {f"shared {n}": t.numpy() for n, t in self.wire.shared_weights().items()}
        momenta = {
            f"momentum {i}": entry["momentum_buffer"].numpy().copy()
            for i, entry in self.optimizer.state_dict()["state"].items()
        }
        return out | weights | shared | momenta

    def counts(self):
        """The counters that a folder holds."""
        stats = self.wire.stats()
        found = {"steps": self.wire.steps, "bytes_sent": stats.bytes_sent}
        if self.kind == "local":
            found["inner_steps"] = self.wire.inner_steps
        return found


def whole(tensor):
    """A parameter's tensor, put together where it is sharded."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def residuals(job):
    """This rank's own part of every residual, settled."""
    return {f"residual {n}": job.wire.residual(n).numpy() for n in SHAPES}


@contextlib.contextmanager
def made(kind, replicas=None):
    """A Job on all ranks; `replicas` of a sharded model, as many as ranks unless told."""
    axes = None
    if kind == "sharded":
        world = torch.distributed.get_world_size()
        replicas = world if replicas is None else replicas
        shape = (replicas, world // replicas)
        axes = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    job = Job(kind, axes)
    try:
        yield job
    finally:
        job.wire.close()


def write(rank, folder):
    """Write the folders; (what this rank holds, counters and the digest of going on) by kind."""
    out = {}
    for kind in KINDS:
        with made(kind) as job:
            job.train(rank, 0, STEPS)
            gradwire.save(job.wire, Path(folder) / kind)
            kept = {name: array.copy() for name, array in (job.kept() | residuals(job)).items()}
            counts = job.counts()
            out[kind] = kept, counts | {"after": job.train(rank, STEPS, MORE)}
    return out


def load(rank, folder, kinds, replicas=None):
    """Read the folders; per kind what this rank holds, counters, and the digest of going on."""
    out = {}
    for kind in kinds:
        with made(kind, replicas) as job:
            gradwire.load(job.wire, Path(folder) / kind)
            kept = {name: array.copy() for name, array in (job.kept() | residuals(job)).items()}
            counts = job.counts()
            out[kind] = kept, counts | {"after": job.train(rank, STEPS, MORE)}
    return out
