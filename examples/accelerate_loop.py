"""Accelerate with gradwire: one line after `prepare`, and one at the end.

torchrun --nproc-per-node 2 examples/accelerate_loop.py
  and on from there: --resume runs/accelerate --epochs 8
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradwire.integrate.accelerate import attach


def data():
    x = torch.randn(256, 100, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :5].sum(1, keepdim=True)), batch_size=16)


def main(folder="runs/accelerate", epochs=4, resume=None):
    set_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(100, 300), nn.ReLU(), nn.Linear(300, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer, batches = accelerator.prepare(model, optimizer, data())
    wire = attach(accelerator, model, method="topk", density=0.01)  # this line

    start = 0
    if resume is not None:
        accelerator.load_state(resume)
        start = wire.steps * accelerator.gradient_accumulation_steps // len(batches)
    for _ in range(start, epochs):
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - y).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state(folder)

    stats = wire.stats()
    share = stats.bytes_sent / max(1, stats.bytes_dense)
    accelerator.print(
        f"sent {stats.bytes_sent:,} bytes, {share:.1%} of what a dense all-reduce sends"
    )
    wire.close()  # and this one, before accelerator.end_training()
    return accelerator.unwrap_model(model), stats


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default="runs/accelerate")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--resume")
    main(**vars(parser.parse_args()))
