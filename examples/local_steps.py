"""Ranks that train on their own for 20 steps at a time, and exchange 5 % of what changed.

torchrun --nproc-per-node 2 examples/local_steps.py
"""

import torch
import torch.distributed as dist
from torch import nn

import gradwire


def main() -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    place = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if cuda else "cpu"
    train(torch.device(place))
    dist.destroy_process_group()


def train(device: torch.device, steps: int = 200) -> float:
    """How many times fewer bytes this rank sent than with a dense all-reduce at every step."""
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(100, 500), nn.ReLU(), nn.Linear(500, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    local = gradwire.local_steps(model, optimizer, every=20, density=0.05, outer="average")

    target = torch.ones(100, 1, device=device) / 10
    generator = torch.Generator(device).manual_seed(rank)
    for step in range(steps):
        x = torch.randn(64, 100, device=device, generator=generator)
        loss = (model(x) - x @ target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        local.step()
        if rank == 0 and step % 40 == 39:
            print(f"step {step + 1:3}  loss {loss.item():8.3f}")

    stats = local.stats()
    times = stats.bytes_dense / max(1, stats.bytes_sent)
    if rank == 0:
        print(f"sent {stats.bytes_sent:,} bytes, {times:,.0f}x fewer than dense at every step")
    return times


if __name__ == "__main__":
    main()
