"""Islands: FSDP2 shards the model inside each, Muon trains it, and local steps go between.

torchrun --nproc-per-node 4 examples/islands.py
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


def train(steps: int = 50) -> float:
    """Two islands, each of half of the ranks; returns how many times fewer bytes go between."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    islands = 2 if dist.get_world_size() % 2 == 0 else 1
    shape = (islands, dist.get_world_size() // islands)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(0)
    model = nn.Sequential(*(Block(64) for _ in range(4)), nn.Linear(64, 1)).to(device)
    for block in model[:-1]:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = gradwire.optim.muon(model, lr=0.01, weight_decay=0.0)
    group = mesh["replicate"].get_group()
    # The exchange runs beside the next two steps; smaller messages would go whole in this toy.
    local = gradwire.local_steps(
        model, optimizer, recipe="muon", replicate_group=group, overlap=2, dense_below=0
    )

    target = torch.randn(64, 1, device=device)
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    for step in range(steps):
        x = torch.randn(64, 64, device=device, generator=generator)
        loss = (model(x) - x @ target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        local.step()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1:3}  loss {loss.item():8.3f}")
    local.exchange()  # lands what is on its way
    stats = local.stats()
    local.close()
    return stats.bytes_dense / max(1, stats.bytes_sent)


def main() -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    times = train()
    if dist.get_rank() == 0:
        print(f"between islands: {times:.0f} times fewer bytes than an all-reduce at every step")
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
