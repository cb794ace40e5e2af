"""Passes of many workers side by side, each on its own thread and stream: for batches that differ
in shape, of which no graph can be made, and whose passes wait for launches and for the host."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch
from torch import Tensor, nn


class Lanes:
    """Forward and backward passes of P workers, with a network for each (`graphs.twins`)."""

    def __init__(self, models: Sequence[nn.Module], device: torch.device) -> None:
        self._models = models
        self._parameters = [list(model.parameters()) for model in models]
        self._threads = ThreadPoolExecutor(len(models))
        cuda = device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) for _ in models] if cuda else []

    def __call__(
        self, loss: Callable[[nn.Module, int], Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Each worker's flat gradient and its loss, which `loss` finds of its network and rank."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream())
        ranks = range(len(self._models))
        found = list(self._threads.map(lambda rank: self._pass(rank, loss), ranks))
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)
        return [flat for flat, _ in found], [value for _, value in found]

    def _pass(self, rank: int, loss: Callable[[nn.Module, int], Tensor]) -> tuple[Tensor, Tensor]:
        with torch.cuda.stream(self._streams[rank]) if self._streams else nullcontext():
            value = loss(self._models[rank], rank)
            gradients = torch.autograd.grad(value, self._parameters[rank])
            return torch.cat([g.reshape(-1) for g in gradients]), value.detach()
