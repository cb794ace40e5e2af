"""Passes of many workers as one CUDA graph: for networks so small that a GPU waits for launches."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.workbench.train.task import Batch

LANES = 8
"""Workers that run side by side."""


class Passes:
    """Forward and backward passes of P workers: `losses` [P] and flat `gradients` [P, d].

    `models` has a network for each worker (`twins` makes them of one), with no autograd graph alive
    on them; `batch` has tensors of shape [P, ...], here and in every call alike. On CUDA all passes
    are one graph with `LANES` branches, elsewhere they run one after another; the kernels and their
    results are the same.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        loss: Callable[[nn.Module, Batch], Tensor],
        batch: Batch,
    ) -> None:
        self._models, self._loss = models, loss
        self._parameters = [list(model.parameters()) for model in models]
        self._batch = [part.clone() for part in batch]
        device, entries = self._batch[0].device, sum(p.numel() for p in self._parameters[0])
        self.losses = torch.zeros(len(models), dtype=torch.float32, device=device)
        self.gradients = torch.zeros(len(models), entries, dtype=torch.float32, device=device)
        self._graph = self._capture() if device.type == "cuda" else None

    def __call__(self, batch: Batch) -> None:
        """Fills `losses` and `gradients` anew."""
        for mine, given in zip(self._batch, batch, strict=True):
            mine.copy_(given)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._in_turn()

    def _pass(self, rank: int) -> None:
        loss = self._loss(self._models[rank], [part[rank] for part in self._batch])
        gradients = torch.autograd.grad(loss, self._parameters[rank])
        torch.cat([g.reshape(-1) for g in gradients], out=self.gradients[rank])
        self.losses[rank].copy_(loss.detach())

    def _capture(self) -> torch.cuda.CUDAGraph:
        buffers = [buffer for model in self._models for buffer in model.buffers()]
        return capture(buffers, self._in_lanes, warm_up=self._in_turn)

    def _in_turn(self) -> None:
        for rank in range(len(self._models)):
            self._pass(rank)

    def _in_lanes(self) -> None:
        begin, lanes = torch.cuda.current_stream(), [torch.cuda.Stream() for _ in range(LANES)]
        for lane in lanes:
            lane.wait_stream(begin)
        for number, lane in enumerate(lanes):
            with torch.cuda.stream(lane):
                for rank in range(number, len(self._models), LANES):
                    self._pass(rank)
        for lane in lanes:
            begin.wait_stream(lane)


def capture(
    buffers: Sequence[Tensor], run: Callable[[], None], warm_up: Callable[[], None]
) -> torch.cuda.CUDAGraph:
    """`run` as a graph. What warming up changes, `buffers` and the generator, is put back."""
    before, random = [buffer.clone() for buffer in buffers], torch.cuda.get_rng_state()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            warm_up()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for buffer, old in zip(buffers, before, strict=True):
        buffer.copy_(old)
    torch.cuda.set_rng_state(random)
    return graph


def twins(model: nn.Module, count: int) -> list[nn.Module]:
    """Copies of `model` that share the memory of its parameters; the first also has its buffers.

    Their parameters are leaves of their own: one that several streams use would tie them together.
    """
    copies, buffers = [], {id(b): b for b in model.buffers()}
    for number in range(count):
        shared: dict[int, Any] = {id(p): nn.Parameter(p.detach()) for p in model.parameters()}
        copies.append(deepcopy(model, {**shared, **({} if number else buffers)}))
    return copies
