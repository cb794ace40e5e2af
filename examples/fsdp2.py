"""Hybrid sharding with a compressed all-reduce: shards inside a node, replicas between nodes.

torchrun --nproc-per-node 4 examples/fsdp2.py
"""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def train(steps: int = 50) -> gradwire.State:
    """Two replicas, each sharded over half of the ranks; returns the handle."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    replicas = 2 if dist.get_world_size() % 2 == 0 else 1
    shape = (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(0)
    model = nn.Sequential(*(Block(64) for _ in range(4)), nn.Linear(64, 1)).to(device)
    for block in model[:-1]:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    group = mesh["replicate"].get_group()
    wire = gradwire.attach(model, replicate_group=group, method="topk", density=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    target = torch.randn(64, 1, device=device)
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    for step in range(steps):
        x = torch.randn(64, 64, device=device, generator=generator)
        loss = (model(x) - x @ target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1:3}  loss {loss.item():8.3f}")
    return wire


def main() -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    wire = train()
    stats = wire.stats()
    if dist.get_rank() == 0:
        share = stats.bytes_sent / max(1, stats.bytes_dense)
        print(
            f"sent {stats.bytes_sent:,} bytes between replicas, {share:.1%} of what a dense "
            f"all-reduce sends"
        )
    wire.close()
    del wire
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
