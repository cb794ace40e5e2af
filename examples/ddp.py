"""The smallest DDP training loop with gradwire: two lines differ from plain DDP.

torchrun --nproc-per-node 2 examples/ddp.py
"""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire


def main(steps: int = 50) -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 500), nn.ReLU(), nn.Linear(500, 1)).to(device)
    ddp = DistributedDataParallel(model)
    wire = gradwire.attach(ddp, method="topk", density=0.01)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)

    target = torch.randn(100, 1, device=device)
    generator = torch.Generator(device).manual_seed(rank)
    for step in range(steps):
        x = torch.randn(64, 100, device=device, generator=generator)
        loss = (ddp(x) - x @ target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1:3}  loss {loss.item():8.3f}")

    stats = wire.stats()
    if rank == 0:
        share = stats.bytes_sent / max(1, stats.bytes_dense)
        print(f"sent {stats.bytes_sent:,} bytes, {share:.1%} of what a dense all-reduce sends")
    wire.close()
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
