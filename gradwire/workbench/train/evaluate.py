"""How good the model is, and whether all ranks have the same one."""

from hashlib import sha256

import torch
import torch.distributed as dist
from torch import nn

from gradwire.workbench.data import Data
from gradwire.workbench.train.task import TrainTask
from gradwire.workbench.train.worker import Worker


@torch.no_grad()
def score(model: nn.Module, task: TrainTask, data: Data, worker: Worker) -> float:
    """The task's score of the model on the test set (collective).

    Each rank takes its part. Running statistics of normalisation layers are rank 0's, as they are
    in DDP's next forward pass and in the checkpoint.
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


def digest(model: nn.Module) -> str:
    """The SHA-256 of all parameters: names, types, shapes and bytes, in order."""
    sha = sha256()
    for name, parameter in model.named_parameters():
        values = parameter.detach().cpu().contiguous()
        sha.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        sha.update(values.flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def replicas_identical(mine: str, worker: Worker) -> bool:
    """Whether every rank has the digest `mine` (collective)."""
    flat = torch.tensor(list(bytes.fromhex(mine)), dtype=torch.uint8)
    all_ranks = [torch.empty_like(flat) for _ in range(worker.world)]
    dist.all_gather(all_ranks, flat, group=worker.control)
    return all(bool((other == flat).all()) for other in all_ranks)
