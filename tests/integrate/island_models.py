"""Trainers on two islands of two ranks, sharded by FSDP2 or wrapped in DDP, for the tests."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import gradwire
from tests.integrate.fsdp import models as sharded

FIELDS = {"every": 3, "density": 0.1, "dense_below": 0}


def axes(islands=2):
    return sharded.mesh(replicas=islands)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def wrapped(kind, net, mesh, **kw):
    """The model as an island trains it."""
    if kind == "fsdp2":
        return sharded.sharded(net, mesh["shard"], **kw)
    return DistributedDataParallel(net, process_group=mesh["shard"].get_group())


class Islander:
    """A rank of an island, which trains on its own data or on that of its whole island."""

    def __init__(self, kind, islands=2, seed=0, make=adamw, alike=False, net=None, **fields):
        self.mesh = axes(islands)
        self.kind, self.alike, self.taken = kind, alike, 0
        net = sharded.model(seed) if net is None else net
        self.model = wrapped(kind, net, self.mesh)
        self.optimizer = make(self.model)
        self.local = gradwire.local_steps(
            self.model,
            self.optimizer,
            replicate_group=self.mesh["replicate"].get_group(),
            **(FIELDS | fields),
        )

    @property
    def island(self):
        return self.mesh["replicate"].get_local_rank()

    def data(self, step):
        return sharded.data(step, rank=self.island if self.alike else dist.get_rank())

    def inner(self, steps=1):
        """Steps of the optimiser without local steps."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            sharded.loss(self.model, self.data(self.taken)).backward()
            self.optimizer.step()
            self.taken += 1

    def train(self, steps):
        for _ in range(steps):
            self.inner()
            self.local.step()
        return self

    def parts(self):
        """This rank's part of the weights as they are in the model."""
        return joined(self.local.parts.read())

    def x(self):
        return joined(self.local.reference)

    def residual(self):
        return joined({name: self.local.residual(name) for name in self.local.reference})

    def whole(self):
        """The whole weights of this rank's island, as bytes."""
        full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.weights()]
        return torch.cat([p.detach().reshape(-1) for p in full]).numpy().tobytes()

    def weights(self):
        module = self.model.module if self.kind == "ddp" else self.model
        return list(module.parameters())

    def close(self):
        self.local.close()


def joined(tensors):
    return torch.cat([t.detach().reshape(-1).float() for t in tensors.values()]).clone()


class Plain:
    """The same without islands: a rank is a whole island."""

    def __init__(self, rank, group, make=adamw, seed=0, **fields):
        self.rank, self.taken = rank, 0
        self.model = sharded.model(seed)
        self.optimizer = make(self.model)
        self.local = gradwire.local_steps(
            self.model, self.optimizer, group=group, **(FIELDS | fields)
        )

    def train(self, steps):
        for _ in range(steps):
            self.optimizer.zero_grad()
            sharded.loss(self.model, sharded.data(self.taken, rank=self.rank)).backward()
            self.optimizer.step()
            self.local.step()
            self.taken += 1
        return self

    def whole(self):
        flat = torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])
        return flat.numpy().tobytes()


def tensor_parallel(shape, seed=0):
    """A mesh of (islands, shards, tensor parallel) and a small model on its last two axes."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tp"))
    torch.manual_seed(seed)
    net = nn.Sequential()
    for name, module in (
        ("norm", nn.LayerNorm(14)),
        ("up", nn.Linear(14, 22)),
        ("act", nn.ReLU()),
        ("down", nn.Linear(22, 14)),
    ):
        net.add_module(name, module)
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(net, mesh=mesh["shard"]), mesh
