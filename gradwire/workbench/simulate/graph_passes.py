"""Compute the gradients of many workers as one CUDA graph.

A small network's kernels end faster than the host launches them. A graph launches all at once.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.workbench.train.task import Batch

STREAMS = 8
"""Workers that run at the same time, each on a stream."""


class GraphPasses:
    """Forward and backward passes of P workers, captured once and replayed at every call.

    A call fills `losses` [P] and the flat `gradients` [P, d]. `models` holds a network per worker;
    `copy_per_worker` makes them from one. No autograd graph of them may be alive. Every batch has
    tensors [P, ...] of the shapes of the first `batch`. On CUDA the graph has `STREAMS` branches.
    On a CPU the workers run in turn, with the same results.
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
        """Overwrite `losses` and `gradients` with those of `batch`."""
        for static, new in zip(self._batch, batch, strict=True):
            static.copy_(new)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._pass_in_turn()

    def _pass(self, rank: int) -> None:
        loss = self._loss(self._models[rank], [part[rank] for part in self._batch])
        gradients = torch.autograd.grad(loss, self._parameters[rank])
        torch.cat([g.reshape(-1) for g in gradients], out=self.gradients[rank])
        self.losses[rank].copy_(loss.detach())

    def _capture(self) -> torch.cuda.CUDAGraph:
        buffers = [buffer for model in self._models for buffer in model.buffers()]
        return capture_pass(buffers, self._pass_on_streams, warm_up=self._pass_in_turn)

    def _pass_in_turn(self) -> None:
        for rank in range(len(self._models)):
            self._pass(rank)

    def _pass_on_streams(self) -> None:
        current = torch.cuda.current_stream()
        streams = [torch.cuda.Stream() for _ in range(STREAMS)]
        for stream in streams:
            stream.wait_stream(current)
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                for rank in range(number, len(self._models), STREAMS):
                    self._pass(rank)
        for stream in streams:
            current.wait_stream(stream)


def capture_pass(
    buffers: Sequence[Tensor], run: Callable[[], None], warm_up: Callable[[], None]
) -> torch.cuda.CUDAGraph:
    """Return `run` as a CUDA graph.

    Running `warm_up` first changes `buffers` and the random generator. Both are put back.
    """
    before, random = [buffer.clone() for buffer in buffers], torch.cuda.get_rng_state()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # Capturing needs compiled kernels and allocated workspaces.
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


def copy_per_worker(model: nn.Module, count: int) -> list[nn.Module]:
    """Return `count` copies of `model` that share the memory of its parameters.

    The first copy also shares the model's buffers. Each copy has its own leaf parameters, because
    autograd would otherwise synchronise the streams that use a common leaf.
    """
    copies, buffers = [], {id(b): b for b in model.buffers()}
    for number in range(count):
        shared: dict[int, Any] = {id(p): nn.Parameter(p.detach()) for p in model.parameters()}
        copies.append(deepcopy(model, {**shared, **({} if number else buffers)}))
    return copies
