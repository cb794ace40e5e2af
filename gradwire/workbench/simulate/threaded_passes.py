"""Compute the gradients of many workers on threads, each with a CUDA stream.

Batches that differ in shape, as those of speech do, cannot be captured as a graph. Threads let one
worker's kernels run while another worker waits for the host.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from gradwire.workbench.simulate.graph_passes import STREAMS

Loss = Callable[[nn.Module, int], Tensor]
"""Compute a worker's loss from its network and its rank."""


class ThreadedPasses:
    """Forward and backward passes of P workers, several at a time.

    `models` holds a network per worker; `graph_passes.copy_per_worker` makes them from one.
    """

    def __init__(self, models: Sequence[nn.Module], device: torch.device) -> None:
        self._models = models
        self._parameters = [list(model.parameters()) for model in models]
        self._count = min(STREAMS, len(models))
        self._threads = ThreadPoolExecutor(self._count)
        cuda = device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) for _ in range(self._count)] if cuda else []

    def __call__(self, loss: Loss) -> tuple[list[Tensor], list[Tensor]]:
        """Return the flat gradients of all workers, and their losses."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream())
        results = list(self._threads.map(lambda t: self._run_thread(t, loss), range(self._count)))
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)
        ranks = range(len(self._models))
        by_rank = [results[rank % self._count][rank // self._count] for rank in ranks]
        return [flat for flat, _ in by_rank], [value for _, value in by_rank]

    def _run_thread(self, thread: int, loss: Loss) -> list[tuple[Tensor, Tensor]]:
        """Run the workers `thread`, `thread` + count, `thread` + 2 count ... in turn."""
        with torch.cuda.stream(self._streams[thread]) if self._streams else nullcontext():
            ranks = range(thread, len(self._models), self._count)
            return [self._pass(rank, loss) for rank in ranks]

    def _pass(self, rank: int, loss: Loss) -> tuple[Tensor, Tensor]:
        value = loss(self._models[rank], rank)
        gradients = torch.autograd.grad(value, self._parameters[rank])
        return torch.cat([g.reshape(-1) for g in gradients]), value.detach()
