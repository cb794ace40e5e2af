"""Passes of many workers side by side, on threads and streams of their own: for batches that differ
in shape, of which no graph can be made, and whose passes wait for launches and for the host."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from gradwire.workbench.simulate.graphs import LANES

Loss = Callable[[nn.Module, int], Tensor]
"""Of a worker's network, and its rank."""


class Lanes:
    """Forward and backward passes of P workers, with a network for each (`graphs.twins`)."""

    def __init__(self, models: Sequence[nn.Module], device: torch.device) -> None:
        self._models = models
        self._parameters = [list(model.parameters()) for model in models]
        self._count = min(LANES, len(models))
        self._threads = ThreadPoolExecutor(self._count)
        cuda = device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) for _ in range(self._count)] if cuda else []

    def __call__(self, loss: Loss) -> tuple[list[Tensor], list[Tensor]]:
        """Each worker's flat gradient, and its loss."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream())
        found = list(self._threads.map(lambda lane: self._lane(lane, loss), range(self._count)))
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)
        ranks = range(len(self._models))
        each = [found[rank % self._count][rank // self._count] for rank in ranks]
        return [flat for flat, _ in each], [value for _, value in each]

    def _lane(self, lane: int, loss: Loss) -> list[tuple[Tensor, Tensor]]:
        """The workers `lane`, `lane` + LANES, and so on, one after the other."""
        with torch.cuda.stream(self._streams[lane]) if self._streams else nullcontext():
            ranks = range(lane, len(self._models), self._count)
            return [self._pass(rank, loss) for rank in ranks]

    def _pass(self, rank: int, loss: Loss) -> tuple[Tensor, Tensor]:
        value = loss(self._models[rank], rank)
        gradients = torch.autograd.grad(value, self._parameters[rank])
        return torch.cat([g.reshape(-1) for g in gradients]), value.detach()
