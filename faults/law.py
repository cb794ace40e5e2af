"""Fault: a killed run resumes with fewer or more ranks. No gradient may be lost on the way."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples import elastic
from faults import crew, job
from faults.inject import Strike
from faults.row import Row

BEFORE, AFTER = 4, (2, 6)
TOLERANCE = 1e-5


def row() -> Row:
    """Return a row with one try per setup and new number of ranks."""
    row = Row("resumed with 2 and 6 ranks instead of 4", came_of_it="the law holds throughout")
    for name, fields in job.SETUPS.items():
        # Momentum is kept too, but is no plain sum of gradients, which the ledger needs.
        fields = {k: v for k, v in fields.items() if k != "momentum"}
        for world in AFTER:
            loss = resize(fields, world)
            row.count(loss and f"{name} with {world} ranks: {loss}")
    return row


def resize(fields: job.Fields, world: int) -> str:
    """Kill a run of four, resume with `world`, and return the ledger's loss, "" for none."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        crew.run(BEFORE, job.train, folder, fields, Strike(1, "optimizer", 5), log=log)
        before = crew.run(BEFORE, kept, folder, fields, log=log)
        after = crew.run(world, ledger, folder, fields, log=log)
    if wrong := [ending for ending in (*before, *after) if ending.result is None]:
        return str(wrong[0])
    then = before[0].result
    now, error, digest = after[0].result
    if any(ending.result[2] != digest for ending in after):
        return "replicas differ"
    drift = float((torch.tensor(now) - torch.tensor(then)).norm() / torch.tensor(then).norm())
    if drift > TOLERANCE:
        return f"the mean residual moved by {drift:.2g} of itself when the ranks changed"
    return f"kept + given differs from delivered by {error:.2g}" if error > TOLERANCE else ""


def kept(rank: int, folder: str, fields: job.Fields) -> list[float]:
    """Return the mean residual of the last checkpoint, loaded by the old number of ranks."""
    ddp, optimizer, wire = elastic.build(**(job.COMMON | fields))
    assert elastic.load(Path(folder), ddp, optimizer, wire) == job.EVERY
    return mean_residual(ddp, wire).tolist()


def ledger(rank: int, folder: str, fields: job.Fields) -> tuple[list[float], float, str]:
    """Return the mean residual at the start, the ledger's error, and a digest of the parameters.

    kept at the start + all gradients given = all updates delivered + kept at the end
    """
    ddp, optimizer, wire = elastic.build(**(job.COMMON | fields))
    start = elastic.load(Path(folder), ddp, optimizer, wire)
    opening = mean_residual(ddp, wire)
    summed, delivered = torch.zeros_like(opening), torch.zeros_like(opening)
    for step in range(start, job.STEPS):
        plain = torch.autograd.grad(
            elastic.loss_of(ddp.module, step), list(ddp.module.parameters())
        )
        summed += mean(nn.utils.parameters_to_vector(plain))
        optimizer.zero_grad()
        elastic.loss_of(ddp, step).backward()
        delivered += nn.utils.parameters_to_vector([p.grad for p in ddp.parameters()]).double()
        optimizer.step()
    closing = mean_residual(ddp, wire)
    error = (opening + summed - delivered - closing).norm() / summed.norm()
    weights = nn.utils.parameters_to_vector(ddp.parameters()).detach()
    return opening.tolist(), float(error), str(weights.double().sum().item())


def mean_residual(ddp: nn.Module, wire: Any) -> Tensor:
    """Return the mean of the ranks' residuals, flat."""
    names = [name for name, _ in ddp.module.named_parameters()]
    return mean(torch.cat([wire.residual(name).reshape(-1) for name in names]))


def mean(tensor: Tensor) -> Tensor:
    """Return the mean over the ranks, in double precision."""
    total = tensor.detach().double()
    dist.all_reduce(total)
    return total / dist.get_world_size()
