"""A GPT on one GPU, on several, or on two sites with a slow link between: the same script.

python examples/two_sites.py
torchrun --nproc-per-node 2 examples/two_sites.py

docs/two-sites.md has the lines for two sites.
"""

import argparse
import gc
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import gradwire

WINDOW = 64


class GPT(nn.Module):
    """Scores the next byte of a text."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.table = nn.Embedding(256, width)
        self.place = nn.Embedding(WINDOW, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0, batch_first=True, norm_first=True, bias=False
        )
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        time = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(time, device=tokens.device)
        x = self.table(tokens) + self.place.weight[:time]
        return self.head(self.blocks(x, mask=mask, is_causal=True))


def connect(sites: int, device: str) -> tuple[int, int]:
    """Join the ranks that torchrun started; return the sites, and the ranks of each."""
    if "RANK" not in os.environ:
        return 1, 1
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    world = dist.get_world_size()
    sites = sites or world // int(os.environ["LOCAL_WORLD_SIZE"])
    return sites, world // sites


def train(options: argparse.Namespace) -> float:
    """Train; returns the loss of the last step on this rank."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    sites, inside = connect(options.sites, device)
    rank = dist.get_rank() if sites * inside > 1 else 0

    torch.manual_seed(0)
    model = GPT(options.width, options.depth).to(device)
    optimizer = gradwire.optim.muon(model, lr=0.01)
    local, between = None, {}
    if inside > 1:  # fast links: every step is averaged by DDP, as always
        mesh = init_device_mesh(device, (sites, inside), mesh_dim_names=("site", "gpu"))
        model = DistributedDataParallel(model, process_group=mesh["gpu"].get_group())
        between = {"replicate_group": mesh["site"].get_group()}
    if sites > 1:  # the slow link: weights, compressed, every few steps
        local = gradwire.local_steps(
            model, optimizer, recipe=options.recipe, overlap=options.overlap, **between
        )

    text = torch.tensor(list(options.text.read_bytes()), device=device)
    draw = torch.Generator().manual_seed(rank)  # every rank reads other parts of the text
    begin, loss = time.perf_counter(), torch.zeros(())
    for step in range(1, options.steps + 1):
        starts = torch.randint(len(text) - WINDOW, (options.batch,), generator=draw)
        tokens = torch.stack([text[s : s + WINDOW + 1] for s in starts.tolist()])
        scores = model(tokens[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(scores, tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if local is not None:
            local.step()
        if rank == 0 and step % options.say == 0:
            tokens_s = step * options.batch * WINDOW / (time.perf_counter() - begin)
            print(f"step {step:4}  loss {loss.item():.3f}  {tokens_s:,.0f} tokens/s a GPU")
    if local is not None:
        local.flush()
        local.exchange()  # now all sites have the same weights
        stats = local.stats()
        if rank == 0:
            times = stats.bytes_dense / max(1, stats.bytes_sent)
            print(
                f"{stats.steps} exchanges, {stats.bytes_sent / 1e6:.2f} MB sent, {times:.0f} times "
                f"less than an all-reduce at every step; {int(stats.skipped)} skipped"
            )
        local.close()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__))
    parser.add_argument("--sites", type=int, default=0, help="0: every machine is a site")
    parser.add_argument("--recipe", default="muon-wan")
    parser.add_argument("--overlap", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--say", type=int, default=30, help="steps between two lines")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=2)
    train(parser.parse_args())
    if dist.is_initialized():
        gc.collect()  # what still holds a communicator has to go first
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
