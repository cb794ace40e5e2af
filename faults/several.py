"""Fault: two models with hooks share a process, by turns and in two threads at once."""

import hashlib
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from faults import crew, job
from faults.row import Row

WORLD, STEPS = 2, 20
PAIRS = [(a, b) for a in job.SETUPS for b in job.SETUPS if a < b and "hier" not in a + b]


class Model:
    """A model, its optimizer and its wire, on a process group of its own."""

    def __init__(self, seed: int, fields: job.Fields) -> None:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(40, 120), nn.ReLU(), nn.Linear(120, 1))
        self.seed, self.group = seed, dist.new_group()
        self.ddp = DistributedDataParallel(net, process_group=self.group)
        self.wire = gradwire.attach(self.ddp, **(job.COMMON | fields))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.02)

    def step(self, number: int) -> None:
        seed = 10_000 * self.seed + 10 * number + dist.get_rank()
        x = torch.randn(16, 40, generator=torch.Generator().manual_seed(seed))
        self.optimizer.zero_grad()
        self.ddp(x).square().mean().backward()
        self.optimizer.step()

    def train(self) -> str:
        for number in range(STEPS):
            self.step(number)
        return self.digest()

    def digest(self) -> str:
        weights = nn.utils.parameters_to_vector(self.ddp.parameters()).detach()
        return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def row() -> Row:
    """Return a row with one try per pair of setups."""
    row = Row("two models in one process, threads", came_of_it="each as if alone, bit for bit")
    for pair in PAIRS:
        with tempfile.TemporaryDirectory() as folder:
            endings = crew.run(WORLD, together, pair, log=Path(folder) / "log")
        row.count(next((f"{pair}: {e}" for e in endings if not same(e.result)), ""))
    return row


def same(result: Any) -> bool:
    """Return True if the three ways ended alike."""
    return result is not None and result[0] == result[1] == result[2]


def together(rank: int, pair: tuple[str, str]) -> list[list[str]]:
    """Return the digests of both models trained alone, by turns, and in two threads."""

    def models() -> list[Model]:
        return [Model(seed, job.SETUPS[name]) for seed, name in enumerate(pair)]

    alone = [model.train() for model in models()]
    turns = models()
    for number in range(STEPS):
        for model in turns:
            model.step(number)
    with ThreadPoolExecutor(2) as pool:
        threads = list(pool.map(Model.train, models()))
    return [alone, [model.digest() for model in turns], threads]
