"""Ranks that train a small transformer on their own with Muon, and exchange weights every 5 steps.

torchrun --nproc-per-node 4 examples/local_steps.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import gradwire

TEXT = (
    b"It is a truth universally acknowledged, that a single man in possession of a good fortune, "
)
TEXT += (
    b"must be in want of a wife. However little known the feelings or views of such a man may be "
)


class Letters(nn.Module):
    """Scores the next byte of a text."""

    def __init__(self, width=64):
        super().__init__()
        self.table = nn.Embedding(256, width)
        self.place = nn.Embedding(32, width)
        self.block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0, batch_first=True, norm_first=True, bias=False
        )
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens):
        time = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(time, device=tokens.device)
        x = self.table(tokens) + self.place.weight[:time]
        return self.head(self.block(x, src_mask=mask, is_causal=True))


def loss_of(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def main() -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    place = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if cuda else "cpu"
    train(torch.device(place))
    dist.destroy_process_group()


def train(device: torch.device, steps: int = 200) -> float:
    """How many times fewer bytes this rank sent than with a dense all-reduce at every step."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Letters().to(device)  # the plain model: DDP would average every step
    optimizer = gradwire.optim.muon(model, lr=0.01)
    local = gradwire.local_steps(model, optimizer, recipe="muon")

    text = torch.tensor(list(TEXT), device=device)
    windows = text.unfold(0, 33, 1)
    generator = torch.Generator().manual_seed(rank)  # every rank has windows of its own
    for step in range(steps):
        batch = windows[torch.randint(len(windows), (16,), generator=generator).to(device)]
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        local.step()
        if rank == 0 and step % 40 == 39:
            with local.shared(), torch.no_grad():  # the weights that all ranks share
                print(f"step {step + 1:3}  loss {loss_of(model, windows).item():8.3f}")

    stats = local.stats()
    times = stats.bytes_dense / max(1, stats.bytes_sent)
    if rank == 0:
        print(f"sent {stats.bytes_sent:,} bytes, {times:,.0f}x fewer than dense at every step")
    return times


if __name__ == "__main__":
    main()
