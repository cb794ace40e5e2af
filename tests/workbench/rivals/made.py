"""A made model in fp64, and a run of a rival on it, for comparison with the literal programs."""

from types import SimpleNamespace

import torch
from torch import nn

WORKERS, STEPS = 3, 20
LR = 0.05


class Made(nn.Module):
    """Matrices of several shapes in three blocks, a table longer than a chunk, and a vector."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.empty(68, 2))
        self.first = nn.Linear(5, 12, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(12, 12, bias=False) for _ in range(3))
        self.norm = nn.Parameter(torch.ones(12))
        self.head = nn.Linear(12, 3, bias=False)
        generator = torch.Generator().manual_seed(1)
        for p in self.parameters():
            if p.dim() > 1:
                p.data = 0.5 * torch.randn(p.shape, generator=generator)
        self.double()

    def forward(self, x):
        h = self.first(x)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        bias = torch.sin(x[:, :2] @ self.table.T).mean(1, keepdim=True)
        return self.head(h * self.norm) + bias


def loss(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def batches(step):
    """A batch for every worker, from its own target."""
    found = []
    for worker in range(WORKERS):
        generator = torch.Generator().manual_seed(100 * step + worker)
        x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
        y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin(), x[:, 3] + 0.1 * worker], 1)
        found.append((x, y))
    return found


def rate(step, lr=LR):
    return lr * (1 - step / 40)


def open_part(recipe):
    run = SimpleNamespace(
        recipe=recipe,
        model=Made(),
        workers=WORKERS,
        lr=LR,
        device=torch.device("cpu"),
        loss=loss,
    )
    return run, recipe.part(run, Made)


def train(recipe, steps=STEPS, lr=LR):
    """Weights by name after these steps of the recipe, as they would be scored."""
    run, part = open_part(recipe)
    for step in range(steps):
        part.step(batches(step), rate(step, lr))
    part.put_weights(run.model)
    return {name: p.detach().tolist() for name, p in run.model.named_parameters()}


def gradients(weights, batch):
    """Gradients by name as nested lists, of a model with these weights."""
    model = Made()
    model.load_state_dict(
        {name: torch.tensor(w, dtype=torch.float64) for name, w in weights.items()}
    )
    loss(model, batch).backward()
    return {name: p.grad.tolist() for name, p in model.named_parameters()}
