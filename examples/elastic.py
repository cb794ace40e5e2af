"""Training that outlives its workers: torchrun starts the ranks again, and they go on bit for bit.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --nproc-per-node 4 --max-restarts 3 examples/elastic.py --folder runs/elastic

The variable gives every restart a store of its own: in torch 2.13 Gloo otherwise finds the
addresses of the ranks that are gone, and the restart fails.
"""

import argparse
import gc
import hashlib
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

LATEST, MODEL = "latest", "model.pt"


def build(**fields):
    """The model under DDP, its optimizer, and the wire."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 120), nn.ReLU(), nn.Linear(120, 60), nn.Linear(60, 1))
    ddp = DistributedDataParallel(model)
    wire = gradwire.attach(ddp, **{"density": 0.01, "timeout": 60.0, **fields})
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9), wire


def loss_of(ddp, step):
    """What is drawn depends on step and rank alone, so a resumed run draws the same."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(32, 40, generator=generator)
    return (ddp(x) - x.sum(1, keepdim=True)).square().mean()


def save(folder, step, ddp, optimizer, wire):
    """Everything into a folder of this step's own; `latest` names it last, in one go."""
    target = folder / f"step-{step:08d}"
    if dist.get_rank() == 0:
        target.mkdir(parents=True, exist_ok=True)
        parts = {"step": step, "model": ddp.module.state_dict()}
        torch.save(parts | {"optimizer": optimizer.state_dict()}, target / MODEL)
    gradwire.save(wire, target)  # every rank's part; when it returns, all of them are there
    if dist.get_rank() == 0:
        scratch = folder / f"{LATEST}.tmp"
        scratch.write_text(target.name)
        os.replace(scratch, folder / LATEST)
        for old in folder.glob("step-*"):
            if old != target:
                shutil.rmtree(old, ignore_errors=True)


def load(folder, ddp, optimizer, wire):
    """The step to go on from: 0, or that of the last checkpoint."""
    if not (folder / LATEST).exists():
        return 0
    target = folder / (folder / LATEST).read_text()
    parts = torch.load(target / MODEL, weights_only=True)
    ddp.module.load_state_dict(parts["model"])
    optimizer.load_state_dict(parts["optimizer"])
    gradwire.load(wire, target)
    return parts["step"]


def train(folder, steps, every, **fields):
    """Trains from the last checkpoint to `steps`; the sha256 of the parameters."""
    ddp, optimizer, wire = build(**fields)
    start = load(folder, ddp, optimizer, wire)
    for step in range(start, steps):
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()
        if (step + 1) % every == 0:
            save(folder, step + 1, ddp, optimizer, wire)
    digest = hashlib.sha256(nn.utils.parameters_to_vector(ddp.parameters()).detach().numpy())
    wire.close()
    return start, digest.hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/elastic"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    start, digest = train(given.folder, given.steps, given.every)
    if dist.get_rank() == 0:
        print(f"from step {start} to {given.steps}, parameters {digest}")
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
