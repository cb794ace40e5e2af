"""Evaluation: the score of a model, and a digest that shows if all ranks have the same model."""

from hashlib import sha256

import torch
import torch.distributed as dist
from torch import nn

from gradwire.workbench.data import Data
from gradwire.workbench.train.task import TrainTask
from gradwire.workbench.train.worker import Worker


@torch.no_grad()
def evaluate_model(model: nn.Module, task: TrainTask, data: Data, worker: Worker) -> float:
    """Return the task's score of the model on the test set (collective).

    Each rank takes its part of the test set. Running statistics of normalisation layers become
    those of rank 0, as in DDP's next forward pass and in the checkpoint.
    """
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    total = data.test_examples
    start, stop = (total * r // worker.world for r in (worker.rank, worker.rank + 1))
    sums = torch.zeros(2, dtype=torch.float64, device=worker.device)
    for first in range(start, stop, data.at_once):
        sums += task.count(model, data.test_batch(first, min(first + data.at_once, stop)))
    model.train()
    return task.score(torch.tensor(worker.sum(*sums.tolist()), dtype=torch.float32))


def parameters_digest(model: nn.Module) -> str:
    """Return the SHA-256 of all parameters: names, types, shapes and bytes, in order."""
    sha = sha256()
    for name, parameter in model.named_parameters():
        values = parameter.detach().cpu().contiguous()
        sha.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        sha.update(values.flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def replicas_identical(own_digest: str, worker: Worker) -> bool:
    """Return True if every rank has the same digest (collective)."""
    flat = torch.tensor(list(bytes.fromhex(own_digest)), dtype=torch.uint8)
    all_ranks = [torch.empty_like(flat) for _ in range(worker.world)]
    dist.all_gather(all_ranks, flat, group=worker.control)
    return all(bool((other == flat).all()) for other in all_ranks)
