"""Small models and loops that the tests of the DDP adapter share."""

import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire


class Net(nn.Module):
    """About 13,000 entries in odd shapes."""

    def __init__(self, width=97):
        super().__init__()
        self.a = nn.Linear(31, width)
        self.b = nn.Linear(width, width)
        self.c = nn.Linear(width, 5)

    def forward(self, x):
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


def model(seed=0, dtype=torch.float32, **kw):
    torch.manual_seed(seed)
    return Net(**kw).to(dtype)


def wrapped(seed=0, dtype=torch.float32, net=None, ddp=None, **fields):
    """A DDP model with small buckets and the wire on it."""
    net = model(seed, dtype) if net is None else net
    module = DistributedDataParallel(net, **{"bucket_cap_mb": 0.01, **(ddp or {})})
    fields = {"density": 0.01, "dense_below": 0, "bundle_mb": 0.0028, **fields}
    return module, gradwire.attach(module, **fields)


def data(rank, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 31, generator=generator).to(dtype)


def train(ddp, rank, steps, start=0, lr=0.1, optimizer=None, dtype=torch.float32):
    optimizer = optimizer or torch.optim.SGD(ddp.parameters(), lr=lr, momentum=0.9)
    for step in range(start, start + steps):
        optimizer.zero_grad()
        ddp(data(rank, step, dtype)).float().square().mean().backward()
        optimizer.step()
    return optimizer


def flat(module):
    return torch.cat([p.detach().reshape(-1).float() for p in module.parameters()])


def wait_for(file, seconds):
    """Until another rank has made this file, or so long."""
    end = time.monotonic() + seconds
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.05)
