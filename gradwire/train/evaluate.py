"""How good the model is, and whether all ranks have the same one."""

from hashlib import sha256

import torch
import torch.distributed as dist
from torch import nn

from gradwire.data import Dataset
from gradwire.train.place import Place

BATCH = 500


@torch.no_grad()
def accuracy(model: nn.Module, data: Dataset, place: Place) -> float:
    """The share of test examples the model gets right (collective).

    Each rank takes its part. Running statistics of normalisation layers are rank 0's, as they are
    in DDP's next forward pass and in the checkpoint.
    """
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    total = len(data.test)
    start, stop = (total * r // place.world for r in (place.rank, place.rank + 1))
    right = torch.zeros((), dtype=torch.int64, device=place.device)
    for first in range(start, stop, BATCH):
        images, labels = data.test_batch(first, min(first + BATCH, stop))
        right += (model(images).argmax(dim=1) == labels).sum()
    model.train()
    return place.sum(int(right))[0] / total


def digest(model: nn.Module) -> str:
    """The SHA-256 of all parameters: names, types, shapes and bytes, in order."""
    sha = sha256()
    for name, parameter in model.named_parameters():
        values = parameter.detach().cpu().contiguous()
        sha.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        sha.update(values.flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def replicas_identical(mine: str, place: Place) -> bool:
    """Whether every rank has the digest `mine` (collective)."""
    flat = torch.tensor(list(bytes.fromhex(mine)), dtype=torch.uint8)
    all_ranks = [torch.empty_like(flat) for _ in range(place.world)]
    dist.all_gather(all_ranks, flat, group=place.control)
    return all(bool((other == flat).all()) for other in all_ranks)
