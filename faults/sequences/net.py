"""A small network with a convolution that may be left out, and traps for its passes."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Trap = Callable[[Tensor], Tensor | None]


class Net(nn.Module):
    """Two convolutions side by side, one behind them and a matrix; 217 entries.

    on_forward, on_backward: called with the hidden values, and with their gradient.
    """

    on_forward: Trap | None = None
    on_backward: Trap | None = None

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3)
        self.other = nn.Conv2d(2, 3, 3)
        self.second = nn.Conv2d(3, 4, 2)
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        """Return three numbers per image; without `both` one convolution is not used."""
        hidden = self.first(x)
        if both:
            hidden = hidden + self.other(x)
        if self.on_forward is not None:
            self.on_forward(hidden)
        if self.on_backward is not None and hidden.requires_grad:
            hidden.register_hook(self.on_backward)
        out: Tensor = self.last(self.second(torch.relu(hidden)).flatten(1))
        return out


def images(data: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Return a rank's batch; `data` is its seed."""
    generator = torch.Generator().manual_seed(7 * data + rank)
    return torch.randn(4, 2, 5, 5, generator=generator, dtype=torch.float32).to(dtype)


def loss_of(out: Tensor) -> Tensor:
    """Return the loss of a batch, fp32."""
    return out.to(torch.float32).square().mean()


def poison(gradient: Tensor) -> Tensor:
    """Return the gradient with an infinite entry."""
    spoiled = gradient.clone()
    spoiled[0, 0, 0, 0] = float("inf")
    return spoiled
